"""Each call compares its prompts once, plans them once and reduces its positions once, whichever way it runs."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.generation import call_context
from hf_fastdecode.generation.prompts import call_plan, first_pass
from hf_fastdecode.generation.prompts.prompt_plan import ComparedPrompts
from hf_fastdecode.generation.steps import modes

from ..architectures.classes import tiny_model_of
from ..patches.slim_models import pair
from ..tiny_models import ragged_prompts
from .calls import PROMPT, SAMPLING

ONCE = {"compared": 1, "planned": 1, "positions": 1}


@pytest.fixture
def counts(monkeypatch) -> Counter[str]:
    """How often calls have compared prompts, planned them, and reduced positions."""
    found = Counter()

    def count(owner, name, what):
        original = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args, **kwargs: (found.update([what]), original(*args, **kwargs))[1])

    count(call_plan, "compare_prompts", "compared")
    count(ComparedPrompts, "plan", "planned")
    for module in (call_context, first_pass):
        count(module, "reduced", "positions")
    return found


def test_shared(model, counts):
    with fd.enabled(model):
        model.generate(**PROMPT, **SAMPLING)
        assert fd.explain(model).last_call.path == "shared"
    assert counts == ONCE


@pytest.mark.parametrize("kept", [80, 79, 60], ids=["whole prompt", "all but a token", "head"])
def test_kept_cache(model, counts, kept):
    with fd.enabled(model):
        cache = fd.prefill(model, PROMPT["input_ids"][:, :kept])
        counts.clear()
        model.generate(**PROMPT, **SAMPLING, **{CACHE: cache})
        assert fd.explain(model).last_call.known_tokens == (kept,)
    assert counts == ONCE


def test_reuse_prefix(model, counts):
    with fd.enabled(model, reuse_prefix=True):
        for _ in range(2):  # the second call finds the whole prompt
            counts.clear()
            model.generate(**PROMPT, **SAMPLING)
            assert counts == ONCE
        assert fd.explain(model).last_call.known_tokens == (80,)


def test_unshared_prompts(counts, monkeypatch):
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
    slim = pair("k+r")[1]
    with fd.enabled(slim, mode="graph", backend="triton"):
        slim.generate(**ragged_prompts(24, 19), do_sample=True, max_new_tokens=2)
        assert fd.explain(slim).last_call.own_tokens == 24 + 19
    assert counts == ONCE


def test_fallback_to_stock(model, counts):
    with fd.enabled(model):
        model.generate(**PROMPT, max_new_tokens=2)
        assert fd.explain(model).last_call.path == "stock"
    assert counts == ONCE


def test_another_loop(model, counts):
    """Its first pass is given positions of its own; those of the call decide nothing."""
    with fd.enabled(model):
        model.generate(**PROMPT, num_beams=3, do_sample=False, max_new_tokens=3)
        assert fd.explain(model).last_call.path == "shared"
    assert counts == ONCE


def test_by_rows(counts):
    model = tiny_model_of("Qwen2VLForConditionalGeneration")
    planes = torch.arange(80).expand(3, 1, -1).clone()
    planes[1:, :, 20:] += 5
    with fd.enabled(model):
        model.generate(**PROMPT, position_ids=planes, do_sample=True, num_return_sequences=3, max_new_tokens=3)
        report = fd.explain(model).last_call
        assert report.path == "shared", report.reason
    assert counts == ONCE | {"positions": 2}  # of the call, which need another loop, and of its first pass
