"""A captured prefill that is begun before transformers has prepared the call; here uncaptured, on the CPU."""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.steps.captured_prefill import CapturedPrefill

from ..tiny_models import ragged_prompts, tiny_model
from .test_captured_prefill import OPTIONS, assert_same_prefill, first_token, uncaptured  # noqa: F401

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="float32 is refused on a GPU"),
    pytest.mark.usefixtures("uncaptured"),
]


@pytest.fixture
def begun(monkeypatch):
    """The prompts of passes that were begun ahead, and how many passes ran in all."""
    found, begin, call = [], CapturedPrefill.begin, CapturedPrefill.__call__
    monkeypatch.setattr(CapturedPrefill, "begin", lambda self, ids: found.append(ids.tolist()) or begin(self, ids))
    monkeypatch.setattr(CapturedPrefill, "__call__", lambda *given: found.append(None) or call(*given))
    return found


def alone(prompt):
    """A prompt without its mask, as one is given that has no padding."""
    return {"input_ids": prompt["input_ids"]}


@pytest.mark.parametrize("name", ["llama-gqa", "gpt2"])
def test_the_next_calls_of_a_captured_one(name, begun):
    model = tiny_model(name)
    prompts = [ragged_prompts(length, seed=length) for length in (40, 50, 64, 130)]
    with fd.enabled(model, mode="eager", **OPTIONS):
        eager = [first_token(model, prompt)[0] for prompt in prompts]
    with fd.enabled(model, mode="graph", **OPTIONS):
        captured = [first_token(model, prompt) for prompt in prompts]
        captures = state_of(model).captures
        assert (captures.lock.holder, captures.owner, captures.scope, captures.ahead) == (None, None, None, None)
    for expected, (found, tokens), prompt in zip(eager, captured, prompts, strict=True):
        assert_same_prefill(found, expected)
        assert tokens == prompt["input_ids"].shape[1]
    second, third = (prompt["input_ids"][0].tolist() for prompt in prompts[1:3])
    assert begun == [None, second, third, None]  # of the last one's size none is captured yet


def padded(model, prompt):
    ids, mask = prompt["input_ids"].clone(), torch.ones_like(prompt["input_ids"])
    mask[:, :5] = 0
    return {"input_ids": ids, "attention_mask": mask}


def changed(model, prompt):
    model.model.norm.variance_epsilon = 0.5
    return alone(prompt)


WRONG = {
    "padding": padded,
    "two prompts": lambda model, prompt: ragged_prompts(40, 50),
    "integers of other size": lambda model, prompt: {"input_ids": prompt["input_ids"].int()},
    "another model": changed,
    "another argument": lambda model, prompt: prompt | {"logits_to_keep": 1},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_guess(wrong, begun):
    model = tiny_model()
    prompt = ragged_prompts(60)
    with fd.enabled(model, mode="graph", **OPTIONS):
        for _ in range(2):
            first_token(model, prompt)
        assert begun == [None, prompt["input_ids"][0].tolist()]
        other = WRONG[wrong](model, prompt)
        found, tokens = first_token(model, other)
        assert tokens > 0
        if wrong == "another argument":
            assert begun[2:] == [None]
        if wrong == "padding":  # after which none is made
            assert begun[2:] == [prompt["input_ids"][0].tolist(), None]
            del begun[:]
            first_token(model, padded(model, prompt))
            assert begun == [None]
        assert begun[-1] is None
    with fd.enabled(model, mode="eager", **OPTIONS):
        assert_same_prefill(found, first_token(model, other)[0])


def test_calls_under_autocast_have_passes_of_their_own(begun):
    model, prompt = tiny_model(), ragged_prompts(60)
    with fd.enabled(model, mode="graph", **OPTIONS):
        for inside, dtype in ((False, torch.float32), (True, torch.float16)) * 2:
            with torch.autocast("cpu", torch.float16, enabled=inside):
                found, tokens = first_token(model, prompt)
            assert (tokens, found[CACHE].layers[0].dtype) == (60, dtype)
        assert state_of(model).captures.prefills.count == 2
    ids = prompt["input_ids"][0].tolist()
    assert begun == [None, None, ids, ids]


def test_a_call_that_fails_or_runs_stock_lets_go_of_the_captures(begun):
    model = tiny_model()
    prompt = ragged_prompts(60)
    with fd.enabled(model, mode="graph", **OPTIONS):
        first_token(model, prompt, use_cache=True, logits_processor=[])
        captures = state_of(model).captures
        with pytest.raises(ZeroDivisionError):
            first_token(model, prompt, use_cache=True, logits_processor=[lambda ids, scores: 1 / 0])
        assert (captures.lock.holder, captures.ahead) == (None, None)
        first_token(model, prompt, use_cache=False, logits_processor=[])
        assert fd.explain(model).last_call.path == "stock"
        assert (captures.lock.holder, captures.prefills.again) == (None, None)
    ids = prompt["input_ids"][0].tolist()
    assert begun == [None, ids, ids]


@pytest.mark.parametrize("thread", [False, True], ids=["within", "in-a-thread"])
def test_calls_of_code_within_a_stock_call_are_captured(begun, thread):
    """The stock call was guessed to be like the last one, and lets go of the captures when it is not."""
    model, prompt, other, inner = tiny_model(), ragged_prompts(60), ragged_prompts(50), []

    def processor(ids, scores):
        if not inner:
            inner.append(None)
            with ThreadPoolExecutor(1) as threads:
                call = partial(model.generate, **other, max_new_tokens=3)
                inner[0] = threads.submit(call).result(timeout=60) if thread else call()
                inner.append(fd.explain(model).last_call.mode)
        return scores

    with fd.enabled(model, mode="graph", **OPTIONS):
        for _ in range(2):
            first_token(model, prompt, use_cache=True, logits_processor=[])
        first_token(model, prompt, use_cache=False, logits_processor=[processor])
    assert len([one for one in begun if one == prompt["input_ids"][0].tolist()]) == 2
    assert inner[1] == "graph"
    assert torch.equal(inner[0], model.generate(**other, max_new_tokens=3))


def test_prompts_that_code_of_the_call_writes_to(begun, monkeypatch):
    """The guess is of what the call was given; what it prefills is compared with that."""
    model, prompt = tiny_model(), ragged_prompts(60)
    prepare = type(model)._prepare_model_inputs

    def marked(self, inputs, start, arguments):
        arguments["input_ids"][:, 20] = 7
        return prepare(self, inputs, start, arguments)

    monkeypatch.setattr(type(model), "_prepare_model_inputs", marked)
    with fd.enabled(model, mode="graph", **OPTIONS):
        found = [first_token(model, {"input_ids": prompt["input_ids"].clone()})[0] for _ in range(3)]
    assert prompt["input_ids"][0].tolist() in begun
    for one in found[1:]:
        assert_same_prefill(one, found[0])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("on purpose"), RuntimeError("on purpose")])
def test_a_guess_that_fails(begun, monkeypatch, error):
    model, prompt = tiny_model(), ragged_prompts(60)

    def fails(*_):
        raise error

    with fd.enabled(model, mode="graph", **OPTIONS):
        expected = first_token(model, prompt)[0]
        with monkeypatch.context() as patch:
            patch.setattr(CapturedPrefill, "begin", fails)
            assert_same_prefill(first_token(model, prompt)[0], expected)
        assert state_of(model).captures.lock.holder is None


def test_other_loops_and_calls_within(begun):
    """Beams prefill in a first pass of their own; a call within one runs eagerly."""
    model = tiny_model()
    prompt = ragged_prompts(60)
    inner = []

    def processor(ids, scores):
        if not inner:
            inner.append(None)
            inner[0] = model.generate(**prompt, max_new_tokens=2, num_return_sequences=2, do_sample=True)
            inner.append(fd.explain(model).last_call.mode)
        return scores

    with fd.enabled(model, mode="auto", **OPTIONS | {"backend": "auto"}):
        state_of(model).captures.steps_asked = 100
        first_token(model, prompt)
        first_token(model, prompt, logits_processor=[processor])
        assert inner[0].shape == (2, 62)
        assert inner[1] == "eager"
        for beams in (1, 2):
            model.generate(**prompt, num_beams=beams, max_new_tokens=2)
        assert state_of(model).captures.lock.holder is None
        assert state_of(model).captures.prefills.again is None
