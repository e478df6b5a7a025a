"""Hooks and forwards that others put on modules: calls run stock, and say why."""

import functools
import inspect
import sys
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import accelerate
import pytest
import torch
from accelerate.hooks import ModelHook, SequentialHook, add_hook_to_module, remove_hook_from_module
from torch.nn import functional
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint
from transformers.utils.deprecation import deprecate_kwarg

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE, takes_cache
from hf_fastdecode.generation.interception.switches import linear_of_torch

from ..tiny_models import ragged_prompts, seeded, tiny_model
from .calls import PROMPT, SAMPLING, as_in_stock, both

PROMPTS = ragged_prompts(57, 71, 40, 66, shared=33)
GREEDY = {"do_sample": False, "max_new_tokens": 8}


def steer(module, args, output):
    """What users write: changes the last position of every row."""
    hidden = output[0] if isinstance(output, tuple) else output
    hidden = hidden.clone()
    hidden[:, -1] += torch.linspace(-3, 3, hidden.shape[-1])
    return (hidden, *output[1:]) if isinstance(output, tuple) else hidden


def per_row(module, args):
    """Adds a vector of its own to each row."""
    hidden = args[0]
    return (hidden + torch.arange(len(hidden))[:, None, None] * torch.linspace(-1, 1, hidden.shape[-1]), *args[1:])


class PerRowForward:
    """A forward of an instance, as research code patches it."""

    def __init__(self, module):
        self.inner = module.forward

    def __call__(self, *args, **kwargs):
        return steer(None, args, self.inner(*args, **kwargs))


class Steering(ModelHook):
    """The same by accelerate's hooks."""

    def post_forward(self, module, output):
        return steer(module, (), output)


class Steered(torch.nn.Module):
    """A module in the place of another, as research code wraps layers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return steer(None, args, self.inner(*args, **kwargs))


def make_inputs_require_grads(module, args, output):
    """A hook that bears the name of a harmless one."""
    return steer(module, args, output)


def installed(model, kind):
    """Put the code on a layer; what takes it off."""
    layer = model.model.layers[1]
    if kind == "hook":
        return layer.register_forward_hook(steer).remove
    if kind == "named":
        return layer.register_forward_hook(make_inputs_require_grads).remove
    if kind == "partial":
        return layer.register_forward_hook(functools.partial(steer)).remove
    if kind == "pre_hook":
        return layer.register_forward_pre_hook(per_row).remove
    if kind == "every":
        only = lambda module, args, output: steer(module, args, output) if module is layer else None  # noqa: E731
        return register_module_forward_hook(only).remove
    if kind == "every_pre":
        only = lambda module, args: per_row(module, args) if module is layer.mlp else None  # noqa: E731
        return register_module_forward_pre_hook(only).remove
    if kind == "forward":
        layer.forward = PerRowForward(layer)
        return lambda: delattr(layer, "forward")
    if kind == "wrapped":
        inner = layer.forward
        layer.forward = functools.wraps(inner)(lambda *args, **kwargs: steer(None, args, inner(*args, **kwargs)))
        return lambda: delattr(layer, "forward")
    if kind == "checkpoint":  # a function of torch's that calls theirs
        layer.mlp.forward = functools.partial(checkpoint, Steered(type(layer.mlp)(model.config)), use_reentrant=False)
        layer.mlp.forward.args[0].inner.load_state_dict(layer.mlp.state_dict())
        return lambda: delattr(layer.mlp, "forward")
    if kind == "module":
        inner, layer.mlp = layer.mlp, Steered(layer.mlp)
        return lambda: setattr(layer, "mlp", inner)
    if kind == "sequence":
        inner, layer.mlp = layer.mlp, torch.nn.Sequential(layer.mlp, Steered(torch.nn.Identity()))
        return lambda: setattr(layer, "mlp", inner)
    if kind == "class":
        inner = type(layer.mlp).forward
        type(layer.mlp).forward = lambda self, hidden: steer(self, (), inner(self, hidden))
        return lambda: setattr(type(layer.mlp), "forward", inner)
    hook = SequentialHook(SequentialHook(Steering())) if kind == "nested" else Steering()
    add_hook_to_module(layer, hook)
    return lambda: remove_hook_from_module(layer)


KINDS = ["hook", "named", "partial", "pre_hook", "every", "every_pre", "forward", "wrapped", "checkpoint", "module"]
KINDS += ["sequence", "class", "accelerate", "nested"]


@pytest.mark.parametrize("kind", KINDS)
def test_what_looks_at_rows_runs_stock(kind, caplog):
    model = tiny_model()
    untouched = model.generate(**PROMPTS, **GREEDY)
    undo = installed(model, kind)
    try:
        stock = model.generate(**PROMPTS, **GREEDY)
        assert not torch.equal(stock, untouched), "code without an effect would show nothing"
        with fd.enabled(model):
            cache = None
            assert torch.equal(model.generate(**PROMPTS, **GREEDY), stock)
            call = fd.explain(model).last_call
            with pytest.raises(ValueError, match="would see prompts packed into one row"):
                cache = fd.prefill(model, PROMPTS)
        assert cache is None
        assert call.path == "stock"
        assert "would see prompts packed into one row" in call.reason
        assert "test_foreign_code" in call.reason
        assert call.reason in caplog.text
    finally:
        undo()
    with fd.enabled(model):
        assert torch.equal(model.generate(**PROMPTS, **GREEDY), untouched)
        assert fd.explain(model).last_call.path == "shared"


def test_a_kept_cache_is_refused_while_a_hook_is_there(model):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT)
        hook = model.model.layers[0].register_forward_hook(steer)
        with pytest.raises(ValueError, match=r"cannot use a SharedContextCache: .* has a forward hook, .*; remove it"):
            model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
        hook.remove()
        assert model.generate(**PROMPT, **SAMPLING, **{CACHE: cache}).shape == (4, 88)


def test_a_wrapper_around_the_model_runs_stock():
    """Put on the instance before `enable`, or after."""
    model = tiny_model()
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    for before in (True, False):
        if not before:
            fd.enable(model)
        inner = model.forward
        model.forward = functools.wraps(inner)(lambda *args, inner=inner, **kwargs: inner(*args, **kwargs))
        fd.enable(model)
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
        assert "LlamaForCausalLM has a forward of its own" in fd.explain(model).last_call.reason
        fd.disable(model)
        del model.forward


def test_known_hooks_share():
    """Of transformers, accelerate and torch.nn.utils."""
    model = tiny_model()
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    model.enable_input_require_grads()
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()  # renamed in 5.23
    torch.nn.utils.parametrizations.weight_norm(model.model.layers[0].mlp.up_proj)
    prune.identity(model.model.layers[0].mlp.down_proj, "weight")

    accelerate.cpu_offload(model.model.layers[1], execution_device="cpu")
    add_hook_to_module(model, ModelHook())
    with fd.enabled(model):
        shared = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
        assert fd.explain(model).last_call.path == "shared", fd.explain(model).last_call.reason
    assert torch.equal(shared, expected)


def test_a_forward_of_ones_own_takes_what_it_took(model):
    """transformers reads its parameters to know what to pass."""
    stock = type(model).forward

    @takes_cache
    def forward(input_ids, attention_mask=None, cache=None, position_ids=None, use_cache=None, **kwargs):
        assert "logits_to_keep" not in kwargs
        given = {CACHE: cache, "position_ids": position_ids, "use_cache": use_cache}
        return stock(model, input_ids, attention_mask, **given, return_dict=True)

    forward.__signature__ = inspect.Signature([*inspect.signature(forward).parameters.values()][:-1])
    model.forward = forward
    try:
        assert "a forward of its own" in as_in_stock(model, lambda: model.generate(**PROMPT, **SAMPLING)).reason
    finally:
        del model.forward


def wrapped(inner, *, drops=False):
    def plain(*args, **kwargs):
        if drops:
            kwargs.pop("custom_generate", None)
        return inner(*args, **kwargs)

    return plain


def functools_wrapped(inner):
    return functools.wraps(inner)(lambda *args, **kwargs: inner(*args, **kwargs))


@pytest.mark.parametrize("wrap", [wrapped, functools_wrapped, lambda inner: functools.partial(inner, top_k=5)])
@pytest.mark.parametrize(
    ("first", "loop"), [("wrapped", {"num_beams": 4, "do_sample": False}), ("enabled", {})], ids=["wrapped", "enabled"]
)
def test_a_wrapper_around_generate_shares(wrap, first, loop):
    model = tiny_model()
    model.generate = wrap(model.generate)
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING | loop))
    if first == "enabled":
        del model.generate
        fd.enable(model)
        model.generate = wrap(model.generate)
    else:
        fd.enable(model)
    assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING | loop)), expected)
    assert fd.explain(model).last_call.path == "shared", fd.explain(model).last_call.reason
    fd.disable(model)
    assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING | loop)), expected)


def test_a_wrapper_of_the_class_shares(monkeypatch):
    model = tiny_model()
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    monkeypatch.setattr(type(model), "generate", functools_wrapped(type(model).generate))
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
        assert fd.explain(model).last_call.path == "shared", fd.explain(model).last_call.reason


def without_kwargs(inner):
    def plain(input_ids, attention_mask, do_sample, top_k, num_return_sequences, max_new_tokens):
        return inner(input_ids, attention_mask=attention_mask, **{**SAMPLING, "max_new_tokens": max_new_tokens})

    return plain


def wraps_without_kwargs(inner):
    return functools.wraps(inner)(without_kwargs(inner))


@pytest.mark.parametrize("wrap", [wrapped, functools_wrapped])
@pytest.mark.parametrize("first", ["wrapped", "enabled"])
def test_a_loop_of_the_caller_runs_whatever_wraps_generate(wrap, first):
    def sevens(model, input_ids, *args, **kwargs):
        return torch.cat([input_ids, torch.full_like(input_ids[:, :3], 7)], dim=1)

    model = tiny_model()
    if first == "enabled":
        fd.enable(model)
    model.generate = wrap(model.generate)
    with fd.enabled(model):
        tokens = model.generate(**PROMPT, **SAMPLING, custom_generate=sevens)
    assert tokens[:, -3:].unique().tolist() == [7]


def test_a_narrow_wrapper_of_the_class_runs_stock(monkeypatch):
    model = tiny_model()
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    inner = type(model).generate

    @functools.wraps(inner)
    def generate(self, input_ids, attention_mask, do_sample, top_k, num_return_sequences, max_new_tokens):
        return inner(self, input_ids, attention_mask=attention_mask, **SAMPLING)

    monkeypatch.setattr(type(model), "generate", generate)
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
        assert fd.explain(model).last_call.path == "stock"


@pytest.mark.parametrize(
    ("wrap", "reason"),
    [
        (without_kwargs, "has no **kwargs to pass custom_generate on with; wrap generate after enable"),
        (wraps_without_kwargs, "has no **kwargs to pass custom_generate on with; wrap generate after enable"),
        (functools.partial(wrapped, drops=True), "plain, which replaces generate, left out custom_generate"),
    ],
)
def test_a_wrapper_around_generate_that_cannot_share_says_why(wrap, reason, caplog):
    model = tiny_model()
    model.generate = wrap(model.generate)
    report = as_in_stock(model, lambda: model.generate(**PROMPT, **SAMPLING))
    assert report.path == "stock"
    assert reason in report.reason
    assert report.reason in caplog.text


def test_third_party_code_beneath_a_decorator_of_transformers_is_seen(monkeypatch):
    model = tiny_model()
    layer = type(model.model.layers[0])
    inner = layer.forward

    def forward(self, hidden_states, *args, **kwargs):
        return inner(self, hidden_states, *args, **kwargs)

    decorated = deprecate_kwarg("old_name", version="99.0.0", new_name="new_name")(forward)
    monkeypatch.setattr(layer, "forward", decorated)
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        assert "runs third-party code" in fd.explain(model).last_call.reason


def hook_of(module, name, *, wrapper=None):
    """A hook as a library defines it, which sees the root's passes; the wrapper's module decorates it."""
    library = {"__name__": module}
    exec(f"def make():\n def {name}(module, *given):\n  return None\n return {name}", library)
    if wrapper is None:
        return library["make"]()
    decorator = {"__name__": wrapper}
    exec("def decorate(func):\n def wrapped_fn(*given):\n  return func(*given)\n return wrapped_fn", decorator)
    return decorator["decorate"](library["make"]())


ENGINE, ZERO_3 = "deepspeed.runtime.engine", "deepspeed.runtime.zero.parameter_offload"
OF_LIBRARIES = {
    "deepspeed-before": ((ENGINE, "_module_forward_pre_hook"), "shared: "),
    "deepspeed-after": ((ENGINE, "_module_forward_post_hook"), "shared: "),
    "deepspeed-unknown": (
        (ENGINE, "check_dataloader_inputs_same_across_ranks"),
        "stock: LlamaForCausalLM has a forward",
    ),
    "zero-3-steps": ((ZERO_3, "_start_of_forward_hook", "deepspeed.utils.nvtx"), "stock: ZeRO-3 divides"),
    "zero-3": (
        (ZERO_3, "_pre_forward_module_hook", "torch._dynamo.eval_frame"),
        "stock: ZeRO-3 divides its parameters",
    ),
    "nvtx-unknown": (("research", "steer", "deepspeed.utils.nvtx"), "stock: LlamaForCausalLM has a forward hook"),
    "lightning": (("lightning.pytorch.profilers.pytorch", "start_recording_forward"), "shared: "),
    "context-parallel": (("accelerate.big_modeling", "_self_attn_pre_forward_hook"), "stock: LlamaForCausalLM has a"),
}


@pytest.mark.parametrize("kind", OF_LIBRARIES)
def test_hooks_of_training_libraries(kind, model, monkeypatch):
    """Calls share where a library's hooks do not depend on rows, and else name what they do."""
    (module, name, *wrapper), expected = OF_LIBRARIES[kind]
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    hook = model.register_forward_pre_hook(hook_of(module, name, wrapper=next(iter(wrapper), None)))
    try:
        stock, tokens, call = both(model, lambda: SAMPLING)
        assert f"{call.path}: {call.reason}".startswith(expected)
        assert torch.equal(tokens, stock)
    finally:
        hook.remove()


@pytest.mark.parametrize(
    ("status", "path"), [("AVAILABLE", "shared"), ("NOT_AVAILABLE", "stock"), ("INFLIGHT", "stock")]
)
def test_parameters_of_zero_3(status, path, monkeypatch):
    """Divided ones are not there when a pass is prepared; gathered ones are as any others."""
    model = tiny_model()
    monkeypatch.setitem(sys.modules, "deepspeed", types.ModuleType("deepspeed"))
    for parameter in model.parameters():
        parameter.ds_status = types.SimpleNamespace(name=status)
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        call = fd.explain(model).last_call
        assert call.path == ("shared" if status == "AVAILABLE" else "stock")
        if status != "AVAILABLE":
            assert "ds3_gather_for_generation" in call.reason
            with pytest.raises(ValueError, match="ZeRO-3 divides its parameters"):
                fd.prefill(model, PROMPT)


def test_the_linear_of_zero_3_is_pytorchs_within_passes(monkeypatch):
    """Unless gradients are recorded; nested, in threads, and after errors."""
    theirs = {"__name__": "deepspeed.runtime.zero.linear", "called": []}
    exec("def linear(*given): called.append(given)", theirs)
    monkeypatch.setattr(functional, "linear", theirs["linear"])
    given = torch.ones(1, 1), torch.ones(1, 1)

    def passes():
        for number in range(50):
            with suppress(KeyError), linear_of_torch(), torch.no_grad():
                with linear_of_torch():
                    assert functional.linear(*given) == 1
                    if number % 2:
                        raise KeyError
                assert functional.linear(*given) == 1

    with ThreadPoolExecutor(4) as threads:
        for one in [threads.submit(passes) for _ in range(4)]:
            one.result()
    assert functional.linear is theirs["linear"]
    assert theirs["called"] == []
    with linear_of_torch():
        functional.linear(*given)
    assert theirs["called"] == [given]
