"""When sharing is worth its time, and what reports say where it is not."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd

from ..architectures.classes import tiny_model_of
from ..image_inputs import prompts_with_images
from ..tiny_models import ragged_prompts, seeded
from .image_calls import SMALL


def prompts_that_begin_alike(name):
    """A model, and four prompts of it whose first 150 tokens are the same, behind an image if it takes one."""
    model = tiny_model_of(name)
    if "Conditional" not in name:
        return model, ragged_prompts(190, 180, 170, 185, shared=150)
    inputs = prompts_with_images(model, *((5, SMALL, 130 + rest) for rest in (40, 30, 20, 35)))
    ids, padding = inputs["input_ids"], (inputs["attention_mask"] == 0).sum(1)
    for row in range(1, 4):
        ids[row, padding[row] : padding[row] + 130] = ids[0, padding[0] : padding[0] + 130]
    return model, inputs


@pytest.mark.parametrize("name", ["Qwen3_5ForCausalLM", "Qwen2_5_VLForConditionalGeneration"])
def test_prompts_that_begin_alike_and_share_nothing_are_told_so(name):
    """Further passes are worth a number of tokens, which the reason names; another bound makes them share."""
    model, prompts = prompts_that_begin_alike(name)
    call = {"max_new_tokens": 4, "do_sample": False}
    stock = model.generate(**prompts, **call)
    with fd.enabled(model):
        assert torch.equal(model.generate(**prompts, **call), stock)
        report = fd.explain(model).last_call
        assert report.path == "stock"
        assert "what prompts begin with would save" in report.reason
        assert "lower min_saved_tokens" in report.reason
        assert "next to each other" not in report.reason
        samples = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 4}
        model.generate(**prompts, **samples)
    with fd.enabled(model, min_saved_tokens=64):
        assert torch.equal(model.generate(**prompts, **call), stock)
        report = fd.explain(model).last_call
        assert report.path == "shared", report.reason
        assert report.prefilled_tokens < int(prompts["attention_mask"].sum()) - 300
        assert "would save" not in report.reason
        drawn = seeded(lambda: model.generate(**prompts, **samples))
    assert torch.equal(drawn, seeded(lambda: model.generate(**prompts, **samples)))
