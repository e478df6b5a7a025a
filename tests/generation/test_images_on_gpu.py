"""Prompts with images, on a GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE

from ..architectures.classes import tiny_model_of
from ..image_inputs import prompts_with_images
from ..tiny_models import seeded
from .calls import as_in_stock

pytestmark = pytest.mark.gpu
CLASSES = ["Qwen2_5_VLForConditionalGeneration", "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"]
PROMPTS = [(5, (4, 4), 9), (3, (8, 4, 1), 11), (12,)]  # some releases mix up several images of a prompt's samples
SAMPLES = {"do_sample": True, "top_k": 0, "num_return_sequences": 3, "max_new_tokens": 16}


@pytest.fixture(params=CLASSES)
def each(request):
    return tiny_model_of(request.param)


def on_gpu(model, dtype, *prompts):
    inputs = prompts_with_images(model, *(prompts or PROMPTS))
    moved = {key: part.to("cuda", dtype if part.is_floating_point() else None) for key, part in inputs.items()}
    return copy.deepcopy(model).to("cuda", dtype), moved


@pytest.mark.parametrize("call", [SAMPLES, {"num_beams": 3, "do_sample": False, "max_new_tokens": 16}])
def test_tokens_are_stocks_in_float32(each, call):
    model, inputs = on_gpu(each, torch.float32)
    as_in_stock(model, lambda: model.generate(**inputs, **call), "shared", min_saved_tokens=1)


def test_captured_steps_draw_what_eager_ones_do(each):
    model, inputs = on_gpu(each, torch.bfloat16)
    drawn = []
    for mode in ("eager", "graph"):
        with fd.enabled(model, mode=mode, min_saved_tokens=1, sampler="hf"):
            drawn.append(seeded(lambda: model.generate(**inputs, **SAMPLES)))
            report = fd.explain(model).last_call
            assert (report.path, report.mode) == ("shared", mode), report.mode_reason
    assert (drawn[0] == drawn[1])[:, -16:].float().mean() > 0.9  # roundings differ


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_turns_over_kept_prompts_and_questions_about_one_image(each, dtype, monkeypatch):
    model, inputs = on_gpu(each, dtype, (5, (4, 4), 19), (5, (4, 4), 21))
    model.generation_config.suppress_tokens = [
        token for name, token in vars(model.config).items() if name.endswith(("_token_id", "_index")) and token
    ]
    width = inputs["input_ids"].shape[1]
    inputs["input_ids"][1, : width - 12] = inputs["input_ids"][0, 2 : width - 10]  # behind padding of 2
    kept_part = {key: part[:, : width - 4] if part.shape[:2] == (2, width) else part for key, part in inputs.items()}
    stock = seeded(lambda: model.generate(**inputs, **SAMPLES))
    with fd.enabled(model, min_saved_tokens=1, min_shared_tokens=4, sampler="hf"):
        for cache in ({}, {CACHE: fd.prefill(model, kept_part)}):
            drawn = seeded(lambda cache=cache: model.generate(**inputs, **cache, **SAMPLES))
            report = fd.explain(model).last_call
            assert report.prefilled_tokens < 2 * width - 4
            if dtype == torch.float32:
                assert torch.equal(drawn, stock)
            else:
                assert (drawn == stock)[
                    :, -16:
                ].float().mean() > 0.6  # roundings differ, and each row goes on from them
