"""Shared passes, whatever is around them: compilers, caches, threads, changes of the model before and during them."""

from __future__ import annotations

import copy
import threading
from functools import partial

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..module_calls import before_calls
from ..tiny_models import ragged_prompts, tiny_model
from .comparison import compared, exact, faults, projection, report_of, sharing
from .passes import CALL, LENGTHS, REAL, ROWS, SHARED, check_shared, outputs


def test_random_numbers_stay_as_in_stock():
    model = tiny_model().train()
    torch.manual_seed(0)
    before = torch.get_rng_state()
    with sharing(model):
        outputs(model)
        assert report_of(model).path == "shared"
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("enabled_first", [True, False])
def test_compiled_models(enabled_first):
    model = tiny_model()
    stock, oracle = outputs(model), exact(model, outputs)
    if enabled_first:
        fd.enable(model, min_saved_tokens=1)
    compiled = torch.compile(model, backend="eager")
    fd.enable(compiled, min_saved_tokens=1)
    try:
        ours = outputs(compiled)
        assert report_of(model) is None  # Dynamo traces stock
    finally:
        fd.disable(compiled)
        torch._dynamo.reset()
    ours = {name.replace("_orig_mod.", ""): value for name, value in ours.items()}
    assert not faults(ours, stock, oracle)


def test_compiled_layers():
    """One by one, they are computed in the pass around them."""
    model = tiny_model()
    stock, oracle = outputs(model), exact(model, outputs)
    for layer in model.model.layers:
        layer.compile(backend="eager")
    try:
        with sharing(model):
            ours = outputs(model)
            assert report_of(model).path == "shared"
    finally:
        torch._dynamo.reset()
    assert not faults(ours, stock, oracle)


@pytest.mark.parametrize("said", ["call", "config"])
def test_tuples(said):
    model = tiny_model()
    if said == "config":
        model.config.return_dict = False
    given = {"return_dict": False} if said == "call" else {}

    def run(model, part):
        with torch.no_grad():
            output = part(model)(**CALL, **given, output_hidden_states=True)
        assert type(output) is tuple
        return {"first": output[0][REAL]} | {str(at): layer[REAL] for at, layer in enumerate(output[1])}

    parts = [lambda model: model.model]  # of a config that says so stock's heads cannot read the decoder's output
    for part in parts + [lambda model: model] * (said == "call"):
        check_shared(model, partial(run, part=part))


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3_text", "gpt_oss", "gpt2", "phi3-window"])
@pytest.mark.parametrize("said", [True, None])
def test_steps_with_the_returned_cache(name, said):
    """Of left-padded rows, three tokens at once and one, also of copied, selected and repeated rows."""
    model = tiny_model(name)
    ids = torch.randint(3, 97, (3, 4), generator=torch.Generator().manual_seed(5))
    mask = torch.cat([ROWS["attention_mask"], torch.ones_like(ids)], 1)

    def run(model):
        found = {}
        with torch.no_grad():
            cache = model(**ROWS, **({} if said is None else {"use_cache": said}))[CACHE]
            twin = copy.deepcopy(cache)
            assert cache.get_seq_length() == 50
            for start, stop in ((0, 3), (3, 4)):
                output = model(ids[:, start:stop], attention_mask=mask[:, : 50 + stop], **{CACHE: cache})
                found[f"{start}"] = output.logits
            assert output[CACHE] is cache
            twin.batch_repeat_interleave(2)
            twin.reorder_cache(torch.tensor([5, 0, 2, 1]))
            picked = torch.tensor([2, 0, 1, 0])
            found["reordered"] = model(ids[picked, :1], attention_mask=mask[picked, :51], **{CACHE: twin}).logits
        return found

    found, report = compared(model, run)
    assert (found, report.path) == ([], "shared")


def test_the_cache_outlives_the_model():
    model = tiny_model()
    with torch.no_grad():
        stock = model(**ROWS, use_cache=True)[CACHE]
        with sharing(model):
            ours = model(**ROWS, use_cache=True)[CACHE]
        del model
    for one, other in zip(ours.layers, stock.layers, strict=True):
        assert one.keys.shape == other.keys.shape
        seen = REAL[:, None, :, None].expand_as(other.keys)
        torch.testing.assert_close(one.keys[seen], other.keys[seen])
        torch.testing.assert_close(one.values[seen], other.values[seen])


def test_weights_changed_between_passes():
    model = tiny_model()
    with sharing(model):
        outputs(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)
        ours = outputs(model)
    assert not faults(ours, outputs(model), exact(model, outputs))


@pytest.mark.parametrize("gradient", [True, False])
def test_threads(gradient):
    """Passes of one model over different rows at a time, and stock passes of another between them."""
    model, other = tiny_model(), tiny_model(seed=1)
    batches = [ragged_prompts(*LENGTHS, shared=SHARED, seed=seed) for seed in range(4)]

    def run(model, rows):
        with torch.set_grad_enabled(gradient):
            logits = model(**rows).logits[REAL]
        if not gradient:
            return {"logits": logits}
        weights = [one for one in model.parameters() if one.requires_grad]
        found = torch.autograd.grad(projection({"logits": logits}), weights)
        return {"logits": logits.detach()} | {f"gradient {at}": one for at, one in enumerate(found)}

    runs = [partial(run, rows=rows) for rows in batches]
    stock, oracle = [run(model) for run in runs], [exact(model, run) for run in runs]
    stock_of_other, wrong = run(other, ROWS), []

    def work(at):
        for _ in range(5):
            wrong.extend(faults(runs[at](model), stock[at], oracle[at]))
            again = run(other, ROWS)
            wrong.extend(name for name in again if not torch.equal(again[name], stock_of_other[name]))

    with sharing(model):
        threads = [threading.Thread(target=work, args=[at]) for at in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert report_of(model).path == "shared"
    assert not wrong


@pytest.mark.parametrize("change", ["disable", "enable"])
def test_disabled_or_enabled_during_a_pass(change):
    model = tiny_model()
    before = dict(vars(model.model))
    stock, oracle = outputs(model), exact(model, outputs)
    fd.enable(model, min_saved_tokens=1)
    run = {"disable": lambda *_: fd.disable(model), "enable": lambda *_: fd.enable(model, share_forward=False)}[change]
    with before_calls(model.model.layers[1], run):
        ours = outputs(model)
    assert not faults(ours, stock, oracle)
    fd.disable(model)
    assert vars(model.model).keys() == before.keys()
    assert not faults(outputs(model), stock, oracle)


def test_a_pass_that_raises():
    model = tiny_model()
    stock = outputs(model)

    def fail(*_):
        raise KeyboardInterrupt

    with sharing(model):
        with before_calls(model.model.layers[1], fail), pytest.raises(KeyboardInterrupt):
            model(**CALL)
        assert report_of(model).path == "failed"
        ours = outputs(model)
        assert report_of(model).path == "shared"
    assert not faults(ours, stock, exact(model, outputs))
    again = outputs(model)
    assert all(torch.equal(again[name], stock[name]) for name in stock)


def test_copies_are_models_of_their_own():
    model = tiny_model()
    with sharing(model):
        outputs(model)
        twin = copy.deepcopy(model)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.mul_(0.9)
        ours = outputs(twin)
        assert report_of(twin).path == "shared"
    fd.disable(twin)
    assert not faults(ours, outputs(twin), exact(twin, outputs))


def test_another_attention_implementation_while_enabled():
    model = tiny_model()
    with sharing(model):
        outputs(model)
        model.set_attn_implementation("eager")
        ours = outputs(model)
    assert not faults(ours, outputs(model), exact(model, outputs))
