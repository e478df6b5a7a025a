"""Images that a decoder's own layers attend to (Mllama): stock's tokens, with their keys and values stored once."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..module_calls import before_calls
from ..tiny_models import seeded
from . import mllama_calls
from .calls import as_in_stock
from .mllama_calls import BEAMS, SAMPLES, prompts
from .uncaptured import on_the_cpu


@pytest.fixture(scope="module")
def mllama():
    return mllama_calls.mllama()


GIVEN = {"one": prompts(0), "ragged": prompts(0, 3, 1), "two-images": prompts(0, 0, images=2)}
SCORES = {"return_dict_in_generate": True, "output_scores": True}


@contextmanager
def encoding(model):
    """Collects how many prompts' images each pass of the vision tower encodes."""
    encoded = []
    with before_calls(model.model.vision_model, lambda args, kwargs: encoded.append(len(kwargs["pixel_values"]))):
        yield encoded


@pytest.mark.parametrize("options", [{}, {"max_rows": 2}])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_samples(mllama, given, options):
    stock = seeded(lambda: mllama.generate(**given, **SAMPLES))
    other = seeded(lambda: mllama.generate(**given | {"pixel_values": -given["pixel_values"]}, **SAMPLES))
    assert not torch.equal(stock, other)
    report, encoded = shared(mllama, given | SAMPLES, **options)
    assert report.inputs == sum(encoded) == len(given["input_ids"])


def shared(model, call, **options):
    """The report of a shared call with stock's tokens, and how many prompts' images each pass encodes."""
    with encoding(model) as encoded:

        def generate():
            encoded.clear()
            return model.generate(**call)

        return as_in_stock(model, generate, "shared", **{"min_saved_tokens": 1} | options), encoded


@pytest.mark.parametrize("extra", [{}, {"do_sample": True, "top_k": 0}], ids=["search", "sample"])
@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_beams(mllama, given, extra):
    call = BEAMS | extra | SCORES
    stock = seeded(lambda: mllama.generate(**given, **call))
    with fd.enabled(mllama, min_saved_tokens=1), encoding(mllama) as encoded:
        found = seeded(lambda: mllama.generate(**given, **call))
        report = fd.explain(mllama).last_call
    assert torch.equal(found.sequences, stock.sequences)
    torch.testing.assert_close(found.sequences_scores, stock.sequences_scores)
    assert (report.path, report.inputs) == ("shared", len(given["input_ids"]))
    assert sum(encoded) == len(given["input_ids"])


@pytest.mark.parametrize("call", [SAMPLES, BEAMS], ids=["samples", "beams"])
def test_rows_that_repeat_a_prompt_with_its_images(mllama, call):
    given = _doubled(prompts(0))
    assert shared(mllama, given | call)[1] == [1]


def test_beams_that_save_too_little(mllama):
    """Stock decodes, which extends the mask of images by what each step adds: row 0 sees one tile of two."""
    given = prompts(0, 2)
    unmasked = {name: value for name, value in given.items() if name != "cross_attention_mask"}
    assert not torch.equal(mllama.generate(**unmasked, **BEAMS), mllama.generate(**given, **BEAMS))
    report = as_in_stock(mllama, lambda: mllama.generate(**given, **BEAMS), min_saved_tokens=10_000)
    assert "fewer than 10000" in report.reason


@pytest.mark.parametrize("call", [{"do_sample": False}, BEAMS], ids=["greedy", "beams"])
def test_a_static_cache_has_room_for_all_images(mllama, call):
    """In calls that run stock, whose images are not held back when transformers makes it."""
    given = prompts(0, images=2) | call | {"max_new_tokens": 3, "cache_implementation": "static"}
    try:
        mllama.generate(**given)
    except RuntimeError:
        pytest.skip("transformers 5.17 has no room for images in a static cache")
    as_in_stock(mllama, lambda: mllama.generate(**given), "stock", min_saved_tokens=10_000)


def test_a_loop_with_a_method_of_the_users(mllama, monkeypatch):
    given = prompts(0, 2)
    stock = seeded(lambda: mllama.generate(**given, **SAMPLES))
    update, steps = mllama._update_model_kwargs_for_generation, []
    own = lambda *args, **kwargs: steps.append(args) or update(*args, **kwargs)  # noqa: E731
    monkeypatch.setattr(mllama, "_update_model_kwargs_for_generation", own, raising=False)
    with fd.enabled(mllama, min_saved_tokens=1):
        assert torch.equal(seeded(lambda: mllama.generate(**given, **SAMPLES)), stock)
        assert fd.explain(mllama).last_call.path == "shared"
    assert len(steps) == SAMPLES["max_new_tokens"]


@pytest.mark.parametrize("call", [SAMPLES, BEAMS], ids=["samples", "beams"])
def test_no_call_continues_a_returned_cache(mllama, call):
    given = prompts(0, 2)
    with fd.enabled(mllama, min_saved_tokens=1):
        found = seeded(lambda: mllama.generate(**given, **call | SCORES))
        assert fd.explain(mllama).last_call.path == "shared"
        with pytest.raises(ValueError, match=r"holds images of the call that returned it.*leave"):
            mllama.generate(found.sequences, **{CACHE: found[CACHE]}, **call)


def _doubled(given):
    return {name: value.repeat_interleave(2, 0) for name, value in given.items()}


def test_a_direct_pass_over_a_returned_cache(mllama):
    given, call = prompts(0, 2), {"do_sample": False, "max_new_tokens": 3, "return_dict_in_generate": True}
    logits = []
    for shares in (False, True):
        with fd.enabled(mllama, min_saved_tokens=1, mode="eager") if shares else nullcontext():
            found = mllama.generate(**_doubled(given), **call)
            mask = torch.cat([given["attention_mask"].repeat_interleave(2, 0), torch.ones(4, 3, dtype=torch.long)], 1)
            seen = given["cross_attention_mask"].repeat_interleave(2, 0)[:, -1:].expand(-1, 23, -1, -1)
            places = {"attention_mask": mask, "position_ids": (mask.cumsum(1) - 1)[:, -1:]}
            step = mllama(found.sequences[:, -1:], cross_attention_mask=seen, **places, **{CACHE: found[CACHE]})
            logits.append(step.logits)
    torch.testing.assert_close(logits[1], logits[0])


def text_alone():
    given = prompts(0, 3)
    return {"input_ids": given["input_ids"].clamp_max(109), "attention_mask": given["attention_mask"]}


def test_text_alone_after_images(mllama):
    stock = seeded(lambda: mllama.generate(**text_alone(), **SAMPLES))
    with fd.enabled(mllama, min_saved_tokens=1):
        mllama.generate(**prompts(0), **SAMPLES)
        assert torch.equal(seeded(lambda: mllama.generate(**text_alone(), **SAMPLES)), stock)
        assert fd.explain(mllama).last_call.path == "shared"


def test_prefill_takes_none(mllama):
    with fd.enabled(mllama), pytest.raises(ValueError, match="attend to images, which no kept cache holds"):
        fd.prefill(mllama, prompts(0))


@pytest.mark.parametrize("call", [SAMPLES, BEAMS], ids=["samples", "beams"])
def test_a_prompt_that_ends_without_an_image(mllama, call):
    """What its tokens see of one differs from what tokens behind it do."""
    given = prompts(0, 2)
    given["cross_attention_mask"][1] = 0
    assert "masked whole" in as_in_stock(mllama, lambda: mllama.generate(**given, **call)).reason


@on_the_cpu
@pytest.mark.parametrize("call", [SAMPLES, BEAMS], ids=["samples", "beams"])
@pytest.mark.parametrize("given", [prompts(0, 3), text_alone()], ids=["images", "text"])
def test_captured_steps(mllama, given, call, uncaptured):
    pytest.importorskip("triton")
    call = call | {"num_return_sequences": 2, "max_new_tokens": 4}
    report = as_in_stock(mllama, lambda: mllama.generate(**given, **call), mode="graph", backend="triton")
    assert (report.path, report.mode) == ("shared", "graph"), report.mode_reason
    assert "ran eagerly" not in report.mode_reason
