"""`disable` where others have wrapped the same methods since, and while calls are under way."""

import copy
import functools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from transformers.generation.streamers import BaseStreamer

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.model_state import state_of

from .short_calls import PROMPT, SAMPLING
from .snapshots import snapshot
from .tiny_models import seeded


def test_what_others_put_on_the_instance_since_stays(model):
    stock_forward = model.forward

    def later(*args, **kwargs):
        return stock_forward(*args, **kwargs)

    fd.enable(model)
    ours = model.forward
    model.forward = later
    fd.disable(model)
    assert model.forward is later
    assert torch.equal(ours(PROMPT["input_ids"]).logits, stock_forward(PROMPT["input_ids"]).logits)


def test_accelerate_hooks_put_on_and_off_in_any_order(model):
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    fd.enable(model)
    add_hook_to_module(model, ModelHook())
    assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
    assert fd.explain(model).last_call.path == "shared"
    fd.disable(model)
    remove_hook_from_module(model)
    assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)


def wrap(model, name):
    """What a user does to a method of the instance; the list that is returned counts the calls."""
    inner, calls = getattr(model, name), []

    @functools.wraps(inner)
    def outer(*args, **kwargs):
        calls.append(1)
        return inner(*args, **kwargs)

    setattr(model, name, outer)
    return outer, calls


@pytest.mark.parametrize("own", [False, True], ids=["", "beneath one of the instance's own"])
@pytest.mark.parametrize("name", ["generate", "forward"])
def test_a_wrapper_around_ours_outlives_it(model, name, own):
    """Enabled, wrapped, disabled, enabled again, in this order: every wrapper of theirs is called, ours only then."""
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    _, beneath = wrap(model, name) if own else (None, [1])
    fd.enable(model)
    outer, calls = wrap(model, name)
    runs = "shared" if name == "generate" else "stock"  # what wraps a forward would see packed prompts
    for path in (runs, None, runs, None):
        beneath[:], calls[:] = [] if own else [1], []
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
        report = fd.explain(model)
        assert report.enabled == (path is not None)
        assert report.last_call is None if path is None else report.last_call.path == path
        assert calls
        assert beneath
        if path is None:
            assert vars(model)[name] is outer
            fd.enable(model)
        else:
            fd.disable(model)


def test_accelerate_hooks_taken_off_after_disable(model):
    """accelerate puts back what it found: ours, which is then nothing but the model's own."""
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    fd.enable(model)
    add_hook_to_module(model, ModelHook())
    fd.disable(model)
    remove_hook_from_module(model)
    with fd.enabled(model):
        assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING)), expected)
        assert fd.explain(model).last_call.path == "shared"
    assert "forward" not in vars(model)


class Calls(BaseStreamer):
    """A streamer that calls a function with every step's tokens."""

    def __init__(self, function):
        self.function = function

    def put(self, value):
        self.function()

    def end(self):
        self.function()


def within(where, function):
    """The argument of `generate` by which it calls a function in the middle of a call."""
    if where == "streamer":
        return {"streamer": Calls(function)}
    if where == "criterion":
        return {"stopping_criteria": [lambda ids, scores: function() or torch.zeros(len(ids), dtype=torch.bool)]}
    return {"logits_processor": [lambda ids, scores: function() or scores]}


@pytest.mark.parametrize("thread", [False, True], ids=["", "another-thread"])
@pytest.mark.parametrize("where", ["streamer", "criterion", "processor"])
def test_disable_within_a_call_waits_for_its_end(model, where, thread):
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    before, inside = snapshot(model), []

    def disable():
        if thread:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(fd.disable, model).result()
        else:
            fd.disable(model)
        inside.append(fd.explain(model).enabled)

    model_state = state_of(fd.enable(model))
    assert torch.equal(seeded(lambda: model.generate(**PROMPT, **SAMPLING, **within(where, disable))), expected)
    assert model_state.last_call.path == "shared"
    assert set(inside) == {False}
    assert snapshot(model) == before


def test_a_call_that_begins_after_disable_runs_stock(model, caplog):
    expected = seeded(lambda: model.generate(**PROMPT, **SAMPLING))
    inner = []

    def generate():
        fd.disable(model)
        state = torch.get_rng_state()
        inner.append(seeded(lambda: model.generate(**PROMPT, **SAMPLING, return_dict_in_generate=True)))
        torch.set_rng_state(state)

    before = snapshot(model)
    fd.enable(model)
    out = seeded(lambda: model.generate(**PROMPT, **SAMPLING, **within("criterion", generate)))
    assert torch.equal(out, expected)
    assert torch.equal(inner[0].sequences, expected)
    assert not isinstance(inner[0][CACHE], fd.SharedContextCache)
    assert not caplog.records
    assert snapshot(model) == before


def test_disable_within_a_call_that_fails(model):
    def fail():
        fd.disable(model)
        raise ZeroDivisionError

    before = snapshot(model)
    fd.enable(model)
    with pytest.raises(ZeroDivisionError):
        model.generate(**PROMPT, **SAMPLING, **within("processor", fail))
    assert snapshot(model) == before


def test_enable_after_disable_within_a_call(model):
    def again():
        fd.disable(model)
        fd.enable(model, min_saved_tokens=1000)

    before = snapshot(model)
    fd.enable(model)
    model.generate(**PROMPT, **SAMPLING, **within("processor", again))
    assert fd.explain(model).last_call.path == "shared"
    model.generate(**PROMPT, **SAMPLING)
    assert fd.explain(model).last_call.path == "stock"
    fd.disable(model)
    assert snapshot(model) == before


def test_a_copy_made_within_a_call_is_not_in_one(model):
    twins = []
    fd.enable(model)
    model.generate(**PROMPT, **SAMPLING, **within("processor", lambda: twins.append(copy.deepcopy(model))))
    fd.disable(twins[0])
    assert "forward" not in vars(twins[0])
