"""Images that a decoder's own layers attend to (Mllama), on a GPU: captured steps read their keys and values."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_fastdecode as fd

from ..tiny_models import seeded
from .calls import as_in_stock
from .mllama_calls import BEAMS, SAMPLES, mllama, prompts

pytestmark = pytest.mark.gpu
CALLS = {"samples": SAMPLES | {"max_new_tokens": 24}, "beams": BEAMS | {"max_new_tokens": 24}}
ON_GPU = {"one": prompts(0), "ragged": prompts(0, 3, 1), "two-images": prompts(0, 0, images=2)}


@pytest.fixture(scope="module")
def cpu_model():
    return mllama()


def on_gpu(model, dtype, given):
    moved = {name: part.to("cuda", dtype if part.is_floating_point() else None) for name, part in given.items()}
    return copy.deepcopy(model).to("cuda", dtype), moved


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("given", ON_GPU.values(), ids=ON_GPU)
def test_tokens_are_stocks_in_float32(cpu_model, given, call):
    model, inputs = on_gpu(cpu_model, torch.float32, given)
    as_in_stock(model, lambda: model.generate(**inputs, **call), "shared", min_saved_tokens=1)


def test_captured_samples_are_those_of_eager_steps(cpu_model):
    model, inputs = on_gpu(cpu_model, torch.bfloat16, ON_GPU["ragged"])
    call, drawn = CALLS["samples"] | {"num_return_sequences": 16}, []
    for mode in ("eager", "graph", "graph"):
        with fd.enabled(model, mode=mode, min_saved_tokens=1, sampler="hf"):
            drawn.append(seeded(lambda: model.generate(**inputs, **call)))
            report = fd.explain(model).last_call
            assert (report.path, report.mode) == ("shared", mode), report.mode_reason
    assert torch.equal(drawn[1], drawn[2])
    for other in drawn[1:]:
        assert (drawn[0] == other)[:, -24:].float().mean() > 0.9  # roundings differ


def test_captured_scores_of_beams(cpu_model):
    """Their error against the scores of the same sequences in fp64 is at most twice that of eager passes."""
    model, inputs = on_gpu(cpu_model, torch.bfloat16, ON_GPU["ragged"])
    exact, width, beams = copy.deepcopy(model).double(), inputs["input_ids"].shape[1], 4
    scored = {"return_dict_in_generate": True, "output_scores": True}
    call = CALLS["beams"] | {"num_beams": beams, "num_return_sequences": beams} | scored
    errors = {}
    for mode in ("eager", "graph"):
        with fd.enabled(model, mode=mode, min_saved_tokens=1):
            out = model.generate(**inputs, **call)
            report = fd.explain(model).last_call
        assert (report.path, report.mode) == ("shared", mode), report.mode_reason
        assert "ran eagerly" not in report.mode_reason
        given = {name: part.repeat_interleave(beams, 0) for name, part in inputs.items() if name != "input_ids"}
        new = out.sequences[:, width:]
        sees = given["cross_attention_mask"]
        given["cross_attention_mask"] = torch.cat([sees, sees[:, -1:].expand(-1, new.shape[1], -1, -1)], 1)
        given["attention_mask"] = mask = torch.cat([given["attention_mask"], torch.ones_like(new)], 1)
        given["pixel_values"] = given["pixel_values"].double()
        with torch.no_grad():
            positions = (mask.cumsum(1) - 1).clamp_min(0)
            logits = exact(out.sequences, position_ids=positions, **given).logits[:, width - 1 : -1]
        right = logits.log_softmax(-1).gather(2, new[..., None])[..., 0].mean(1)
        errors[mode] = (out.sequences_scores.double() - right).square().mean().sqrt().item()
    assert errors["graph"] <= 2 * errors["eager"]
