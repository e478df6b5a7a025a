"""Calls that run stock by the shapes of their arguments alone: what runs before them, and what still is noticed."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation.model_state import state_of
from hf_fastdecode.generation.structure import KeptStructure

from ..short_calls import PROMPT, SAMPLING
from ..tiny_models import ragged_prompts, seeded

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU steps may be captured whatever is saved")
TINY = ragged_prompts(9)
PACKAGE = str(Path(fd.__file__).parent)


@pytest.fixture
def unasked(monkeypatch):
    """From the second call on, raise where a call asks for the model's structure."""

    def refuse(self, *arguments):
        raise AssertionError("the model was looked at")

    def arm():
        monkeypatch.setattr(KeptStructure, "of", refuse)

    return arm


def calls_in_package(run):
    """How often each function of the package is called."""
    counted = Counter()

    def count(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            counted[frame.f_code.co_qualname] += 1

    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(None)
    return counted


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("tokens", [4, 16])
def test_few_functions_of_the_package_run_in_a_tiny_call(model, count, tokens):
    """They were 600 before the shapes of arguments were asked for first; a pass takes six, and six in its decoder."""
    call = {**TINY, "do_sample": True, "num_return_sequences": count, "max_new_tokens": tokens}
    with fd.enabled(model):
        first = calls_in_package(lambda: model.generate(**call))
        later = calls_in_package(lambda: model.generate(**call))
    assert later.total() <= 75 + 13 * tokens
    assert later.total() < first.total() / 2
    assert "KeptStructure.of" in first
    assert "KeptStructure.of" not in later


CALLS = {
    "greedy": {"do_sample": False},
    "samples": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
    "hidden states": {"do_sample": True, "output_hidden_states": True, "return_dict_in_generate": True},
    "a config": {"generation_config": GenerationConfig(do_sample=True, num_return_sequences=2, max_new_tokens=4)},
}


@pytest.mark.parametrize("arguments", CALLS.values(), ids=CALLS)
def test_tokens_and_reasons_are_those_of_a_call_that_asks_everything(model, arguments, unasked, caplog):
    call = TINY | {"max_new_tokens": 4} | arguments

    def run():
        out = seeded(lambda: model.generate(**call))
        return out if isinstance(out, torch.Tensor) else out.sequences

    stock = run()
    with fd.enabled(model):
        assert torch.equal(run(), stock)
        said, messages = fd.explain(model).last_call, list(caplog.messages)
        unasked()
        assert torch.equal(run(), stock)
        again = fd.explain(model).last_call
    assert again is not said
    assert (again.path, again.reason) == ("stock", said.reason)
    assert said.reason.startswith("sharing would save ")
    assert caplog.messages == messages


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        (ragged_prompts(20, 20), "sharing would save at most 20 tokens, fewer than 64"),
        (
            ragged_prompts(90, 90),
            "sharing would save at most 2 tokens, fewer than 64",
        ),  # that they begin with by chance
        (ragged_prompts(20, 12), "sharing would save at most 20 tokens, fewer than 64"),
    ],
    ids=["short", "different", "padded"],
)
def test_several_prompts_save_at_most_what_neighbours_begin_with(model, prompts, reason, unasked):
    with fd.enabled(model):
        model.generate(**prompts, do_sample=False, max_new_tokens=3)
        unasked()
        expected = prompts["input_ids"][1:] == prompts["input_ids"][:-1]
        alike = int(expected.cumprod(1).sum())
        model.generate(**prompts, do_sample=False, max_new_tokens=3)
        said = fd.explain(model).last_call.reason
    if prompts["attention_mask"].all():
        reason = f"sharing would save at most {alike} tokens, fewer than 64"
    assert said.startswith(reason)
    assert "put prompts that begin alike next to each other" in said


def opened(model):
    """An enabled model of which a tiny call ran stock."""
    model.generate(**TINY, do_sample=False, max_new_tokens=2)
    assert state_of(model).short_calls is not None


def test_larger_calls_share(model, monkeypatch):
    with fd.enabled(model):
        opened(model)
        model.generate(**PROMPT, **SAMPLING)
        assert fd.explain(model).last_call.path == "shared"
        model.generate(**TINY, do_sample=True, num_return_sequences=16, max_new_tokens=2)
        assert fd.explain(model).last_call.path == "shared"
        with monkeypatch.context() as patched:
            patched.setattr(model.generation_config, "do_sample", True)
            patched.setattr(model.generation_config, "num_return_sequences", 16)
            model.generate(**TINY, do_sample=True, max_new_tokens=2)
        assert fd.explain(model).last_call.path == "shared"
        embeddings = model.get_input_embeddings()(PROMPT["input_ids"])
        model.generate(inputs_embeds=embeddings, **SAMPLING)
        assert fd.explain(model).last_call.path == "shared"


def loop_of_branches(model, input_ids, branches, **arguments):
    """A ``custom_generate`` that draws several tokens after each prompt, in rows that it makes by itself."""
    rows = input_ids.repeat_interleave(branches, 0)
    scores = model(input_ids=rows, attention_mask=torch.ones_like(rows), **{CACHE: arguments[CACHE]}).logits[:, -1]
    return torch.cat([rows, scores.softmax(-1).multinomial(1)], 1)


def test_a_users_loop_may_make_rows_by_itself(model):
    ids, more = ragged_prompts(60)["input_ids"], {"branches": 8, "max_new_tokens": 1}
    call = {"input_ids": ids, "custom_generate": loop_of_branches, **more}
    stock = seeded(lambda: model.generate(**call))
    with fd.enabled(model):
        opened(model)
        assert torch.equal(seeded(lambda: model.generate(**call)), stock)
        assert fd.explain(model).last_call.path == "shared"


def test_a_given_cache_is_used_and_checked(model):
    with fd.enabled(model):
        opened(model)
        cache = fd.prefill(model, TINY)
        expected = model.generate(**TINY, do_sample=False, max_new_tokens=4)
        assert fd.explain(model).last_call.path == "stock"
        tokens = model.generate(**TINY, do_sample=False, max_new_tokens=4, **{CACHE: cache})
        assert torch.equal(tokens, expected)
        assert fd.explain(model).last_call.path == "shared"
        with torch.no_grad():
            model.lm_head.weight.add_(1)
        with pytest.raises(ValueError, match="made with other weights"):
            model.generate(**TINY, do_sample=False, max_new_tokens=4, **{CACHE: cache})


def test_options_that_are_forced_raise(model):
    with fd.enabled(model):
        opened(model)
        with fd.enabled(model, mode="graph"), pytest.raises(ValueError, match="mode='graph' cannot run"):
            model.generate(**TINY, do_sample=False, max_new_tokens=2)
        with fd.enabled(model, min_saved_tokens=0):
            model.generate(**TINY, do_sample=True, num_return_sequences=2, max_new_tokens=2)
            assert fd.explain(model).last_call.path == "shared"


class Calls(LogitsProcessor):
    """Makes one call of a function within the loop."""

    def __init__(self, inner):
        self.inner = inner

    def __call__(self, input_ids, scores):
        inner, self.inner = self.inner, None
        if inner is not None:
            inner()
        return scores


def test_calls_and_passes_within_a_tiny_call_share(model):
    """Only what prepares the outer call is left out."""
    found = []

    def inner():
        model.generate(**PROMPT, **SAMPLING)
        found.append(fd.explain(model).last_call.path)
        cache = fd.prefill(model, PROMPT)
        model(input_ids=torch.tensor([[5]]), **{CACHE: cache})
        found.append(cache.get_seq_length())

    with fd.enabled(model):
        opened(model)
        call = {**TINY, "do_sample": False, "max_new_tokens": 4}
        expected = model.generate(**call)
        assert torch.equal(model.generate(**call, logits_processor=LogitsProcessorList([Calls(inner)])), expected)
        assert found == ["shared", PROMPT["input_ids"].shape[1] + 1]
        model.generate(**PROMPT, **SAMPLING)
        assert fd.explain(model).last_call.path == "shared"


def test_disabled_within_a_tiny_call(model):
    fd.enable(model)
    opened(model)
    processors = LogitsProcessorList([Calls(lambda: fd.disable(model))])
    model.generate(**TINY, do_sample=False, max_new_tokens=3, logits_processor=processors)
    assert not fd.explain(model).enabled
    assert "generate" not in vars(model)


def test_a_tiny_call_that_fails_is_reported(model):
    def fail():
        raise RuntimeError("no more")

    with fd.enabled(model):
        opened(model)
        processors = LogitsProcessorList([Calls(fail)])
        with pytest.raises(RuntimeError, match="no more"):
            model.generate(**TINY, do_sample=False, max_new_tokens=3, logits_processor=processors)
        report = fd.explain(model).last_call
    assert (report.path, report.reason) == ("failed", "RuntimeError: no more")


def test_prompts_that_arrive_one_at_a_time_are_still_noticed(model, caplog, unasked):
    with fd.enabled(model):
        opened(model)
        unasked()
        for _ in range(4):
            model.generate(**ragged_prompts(80), do_sample=False, max_new_tokens=2)
    assert sum("`reuse_prefix=True` keeps prompts" in one for one in caplog.messages) == 1


def test_a_model_of_another_dtype_is_asked_again(model):
    with fd.enabled(model):
        opened(model)
        before = state_of(model).short_calls
        model.to(torch.float64)
        model.generate(**TINY, do_sample=False, max_new_tokens=2)
        after = state_of(model).short_calls
    assert torch.float32 in before.conditions and torch.float64 in after.conditions
