"""`enable` and `disable`: on the instance only, idempotent, undone exactly."""

import copy
import gc
import inspect
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import fields
from pathlib import Path

import accelerate
import pytest
import torch
from transformers import DynamicCache

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.options import CHOICES, Options

from .module_calls import before_calls
from .short_calls import PROMPT, SAMPLING
from .snapshots import snapshot
from .tiny_models import seeded, tiny_model


def test_disable_restores_every_object(model):
    before = snapshot(model)
    assert fd.enable(model) is model
    assert snapshot(model) != before
    model.generate(**PROMPT, **SAMPLING)
    assert fd.disable(model) is model
    assert snapshot(model) == before


def test_between_calls_only_the_model_and_its_decoder_differ(model):
    before = snapshot(model)
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        during = snapshot(model)
    changed = {key for key in before if before[key] != during[key]}
    assert changed == {"instance", "modules"}  # the model is the first of its own modules, its decoder the second
    assert before["modules"][2:] == during["modules"][2:]


class Boom(BaseException):
    """Not an Exception: what a user's Ctrl-C is."""


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Boom], ids=lambda error: error.__name__)
@pytest.mark.parametrize("where", ["body", "layer in prefill", "layer in decode", "processor"])
def test_an_exception_leaves_nothing_behind(model, error, where):
    layer = model.model.layers[1]
    calls = []

    def fail(*args):
        calls.append(1)
        if len(calls) > (1 if where == "layer in decode" else 0):
            raise error("on purpose")

    def processor(input_ids, scores):
        raise error("on purpose")

    before = snapshot(model)
    watched = before_calls(layer, fail) if where.startswith("layer") else nullcontext()
    with pytest.raises(error, match="on purpose"), fd.enabled(model), watched:  # noqa: PT012
        extra = {"logits_processor": [processor]} if where == "processor" else {}
        model.generate(**PROMPT, **SAMPLING, **extra)
        raise error("on purpose")
    assert snapshot(model) == before
    stock = tiny_model("llama-gqa")
    assert torch.equal(*(seeded(lambda m=m: m.generate(**PROMPT, **SAMPLING)) for m in (model, stock)))


def test_enabled_after_a_failed_call_still_works(model):
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    with fd.enabled(model):
        with pytest.raises(ZeroDivisionError):
            model.generate(**PROMPT, **SAMPLING, stopping_criteria=[lambda ids, scores: 1 / 0 and None])
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
        assert fd.explain(model).last_call.path == "shared"


def test_enable_twice_disable_once(model):
    before = snapshot(model)
    fd.enable(fd.enable(model), min_saved_tokens=1000)
    model.generate(**PROMPT, **SAMPLING)
    assert fd.explain(model).last_call.path == "stock"  # the second call's options hold
    fd.disable(fd.disable(model))
    assert snapshot(model) == before


def test_nested_blocks_restore_the_outer_options(model):
    before = snapshot(model)
    with fd.enabled(model, min_saved_tokens=1000):
        with fd.enabled(model):
            model.generate(**PROMPT, **SAMPLING)
            assert fd.explain(model).last_call.path == "shared"
        model.generate(**PROMPT, **SAMPLING)
        assert fd.explain(model).last_call.path == "stock"
    assert snapshot(model) == before


def test_a_block_restores_a_model_that_was_disabled_in_it(model):
    fd.enable(model, min_shared_tokens=40)
    try:
        with fd.enabled(model, backend="plain"):
            fd.disable(model)
        assert state_of(model).options.min_shared_tokens == 40
    finally:
        fd.disable(model)


def test_a_forward_of_the_instances_own_is_kept(model):
    """accelerate puts a forward on the instance; it runs, and it is there afterwards."""
    calls = []
    stock_forward = model.forward

    def own_forward(*args, **kwargs):
        calls.append(1)
        return stock_forward(*args, **kwargs)

    model.forward = own_forward
    own_forward.__signature__ = inspect.signature(stock_forward)
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    calls.clear()
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
        assert len(calls) == 6
    assert model.forward is own_forward


def test_two_models_of_one_config_do_not_disturb_each_other(model):
    other = type(model)(model.config).eval()
    expected = seeded(lambda: other.generate(**PROMPT, **SAMPLING))
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        assert torch.equal(seeded(lambda: other.generate(**PROMPT, **SAMPLING)), expected)
    assert not fd.explain(other).enabled


def test_a_deep_copy_is_enabled_by_itself(model):
    fd.enable(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    stock = copy.deepcopy(fd.disable(model))
    stock.load_state_dict(twin.state_dict())
    expected = seeded(lambda: stock.generate(**PROMPT, **SAMPLING))
    assert torch.equal(seeded(lambda: twin.generate(**PROMPT, **SAMPLING)), expected)
    assert fd.explain(twin).last_call.path == "shared"
    fd.disable(twin)
    assert "forward" not in vars(twin)


def test_training_goes_through_the_stock_forward(model):
    ids = PROMPT["input_ids"]
    model(ids, labels=ids).loss.backward()
    expected = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        model(ids, labels=ids).loss.backward()
    for parameter, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(parameter.grad, grad)


def test_saving_and_loading_an_enabled_model(model, tmp_path):
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert "hf_fastdecode" not in (tmp_path / "config.json").read_text()
    assert torch.equal(*(seeded(lambda m=m: m.generate(**PROMPT, **SAMPLING)) for m in (model, loaded)))


def test_a_pickled_model_is_loaded_disabled(model, caplog):
    with fd.enabled(model):
        loaded, _ = pickle.loads(pickle.dumps(model)), pickle.dumps(model)
    (told,) = [record.message for record in caplog.records if record.name == "hf_fastdecode"]
    assert "it is as before enable: call hf_fastdecode.enable(model) on what is loaded" in told
    assert str(fd.explain(loaded)) == "LlamaForCausalLM: not enabled; call hf_fastdecode.enable(model)"
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    assert torch.equal(seeded(lambda: loaded.generate(**PROMPT, **SAMPLING)), expected)
    with fd.enabled(loaded):
        assert torch.equal(seeded(lambda: loaded.generate(**PROMPT, **SAMPLING)), expected)
        assert fd.explain(loaded).last_call.path == "shared"
    assert "generate" not in vars(loaded)


def test_a_call_keeps_no_memory_alive(model):
    with fd.enabled(model):
        cache = weakref.ref(model.generate(**PROMPT, **SAMPLING, return_dict_in_generate=True)[CACHE])
        gc.collect()
        assert cache() is None


def test_a_call_that_runs_stock_keeps_no_memory_alive(model):
    def alive():
        return sum(type(found) is DynamicCache for found in gc.get_objects())

    gc.collect()
    gc.disable()
    before = alive()
    try:
        with fd.enabled(model):
            model.generate(PROMPT["input_ids"][:, :9], max_new_tokens=3)
            assert fd.explain(model).last_call.path == "stock"
        assert alive() == before
    finally:
        gc.enable()


def test_generate_shows_its_own_signature(model):
    stock = inspect.signature(model.forward)
    with fd.enabled(model):
        assert inspect.signature(model.forward) == stock


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backend": "fast"}, r"backend must be one of auto, .*, got 'fast'"),
        ({"min_shared_tokens": 0}, "min_shared_tokens must be an integer of at least 1, got 0"),
        ({"min_saved_tokens": -1}, "min_saved_tokens must be an integer of at least 0, or .auto., got -1"),
        ({"max_prefill_tokens": 1.5}, r"max_prefill_tokens must be an integer of at least 1, got 1\.5"),
        ({"max_rows": 0}, "max_rows must be an integer of at least 1, or None for no bound, got 0"),
        ({"max_rows": True}, "max_rows must be an integer of at least 1, or None for no bound, got True"),
        ({"peer_timeout": 2}, "peer_timeout must be a number of at least 3 seconds, got 2"),
        ({"peer_timeout": "60"}, "peer_timeout must be a number of at least 3 seconds, got '60'"),
    ],
)
def test_options_out_of_bounds(model, options, message):
    before = snapshot(model)
    with pytest.raises(ValueError, match=message):
        fd.enable(model, **options)
    assert snapshot(model) == before


def test_enable_explains_every_option():
    parameters = dict(list(inspect.signature(fd.enable).parameters.items())[1:])
    assert {name: given.default for name, given in parameters.items()} == {
        field.name: field.default for field in fields(Options)
    }
    explained = inspect.getdoc(fd.enable)
    assert all(f"\n    {name}: " in explained for name in parameters)
    page = (Path(__file__).parents[1] / "docs/options.md").read_text()
    assert all(f"\n| `{name}` | " in page for name in parameters)
    for known in CHOICES.values():
        assert all(f"``{value}``" in explained for value in known)


def test_an_unknown_option_is_a_type_error(model):
    with pytest.raises(TypeError):
        fd.enable(model, turbo=True)


@pytest.mark.parametrize("call", [fd.enable, fd.explain, lambda model: fd.prefill(model, PROMPT["input_ids"])])
def test_only_transformers_models(call):
    with pytest.raises(TypeError, match="expected a transformers PreTrainedModel, got Linear"):
        call(torch.nn.Linear(2, 2))
    for undo in (fd.disable, lambda model: fd.enabled(model).__enter__()):
        with pytest.raises(TypeError, match="expected a transformers PreTrainedModel, got NoneType"):
            undo(None)


def test_a_forced_backend_runs_or_raises(model):
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    for backend in ("plain", "cpu"):
        with fd.enabled(model, backend=backend):
            assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
            assert backend in "".join(fd.explain(model).last_call.layers)
    with (
        fd.enabled(model, backend="cudnn"),
        pytest.raises(ValueError, match=r"'cudnn' cannot run: .* use backend='auto'"),
    ):
        model.generate(**PROMPT, **SAMPLING)


def test_the_environment_stands_in_for_auto(model, monkeypatch):
    monkeypatch.setenv("HF_FASTDECODE_BACKEND", "plain")
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        assert "plain" in "".join(fd.explain(model).last_call.layers)
    with fd.enabled(model, backend="cpu"):
        model.generate(**PROMPT, **SAMPLING)
        assert "plain" not in "".join(fd.explain(model).last_call.layers)
    monkeypatch.setenv("HF_FASTDECODE_BACKEND", "cudnn")
    with (
        fd.enabled(model),
        pytest.raises(
            ValueError,
            match=r"'cudnn' cannot run: .* use backend='plain', or 'auto' with \$HF_FASTDECODE_BACKEND unset",
        ),
    ):
        model.generate(**PROMPT, **SAMPLING)
    monkeypatch.setenv("HF_FASTDECODE_BACKEND", "warp")
    with pytest.raises(ValueError, match=r"HF_FASTDECODE_BACKEND must be one of auto, .* got 'warp'"):
        fd.enable(model)


def test_threads_share_a_model(model):
    """Shared and stock passes of several threads overlap on one config; each gets stock tokens, and nothing stays."""
    before = snapshot(model)
    greedy = {"max_new_tokens": 12, "do_sample": False}
    rows = {key: value.repeat(3, 1) for key, value in PROMPT.items()}
    other = type(model)(model.config).eval()
    other.load_state_dict(model.state_dict())
    expected = model.generate(**rows, **greedy)

    def work(turn):
        return [(model if turn % 2 else other).generate(**rows, **greedy) for _ in range(4)]

    with fd.enabled(model), ThreadPoolExecutor(4) as pool:
        outs = [out for outs in pool.map(work, range(4)) for out in outs]
    assert all(torch.equal(out, expected) for out in outs)
    assert snapshot(model) == before


def test_an_offloaded_model(model):
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    accelerate.cpu_offload(model, execution_device="cpu")
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
        assert fd.explain(model).last_call.path == "shared"
