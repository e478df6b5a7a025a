"""Positions of tokens that stand for images are computed on the CPU, by transformers' code."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn

import hf_fastdecode as fd
from hf_fastdecode.generation.inputs.given import placing_on_host

from ..architectures.classes import tiny_model_of
from ..image_inputs import prompts_with_images

CLASSES = [
    "Qwen2VLForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration",
    "Glm4vForConditionalGeneration",
]
PROMPTS = [(5, (4, 4), 9), (3, (4, 8, 1), 2, (4, 4, 2), 12), (40,)]
PREPARE = "_prepare_position_ids_for_generation"


def positions_of(model: nn.Module, prompts: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    positions = getattr(model, PREPARE)(prompts["input_ids"], dict(prompts))
    return positions, model.model.rope_deltas


@pytest.mark.parametrize("name", CLASSES)
def test_positions_are_stocks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what the model is given, the method gets ids, masks and sizes on the CPU, and all else as it is."""
    model, moved = tiny_model_of(name), set[int]()
    prompts = prompts_with_images(model, *PROMPTS)
    expected, own = positions_of(model, prompts), Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: moved.add(id(tensor)) or own(tensor))
    with fd.enabled(model):
        found = positions_of(model, prompts)
    assert all(map(torch.equal, found, expected))
    assert {name for name, value in prompts.items() if id(value) in moved} == prompts.keys() - {"pixel_values"}
    assert "get_rope_index" not in vars(model.model)
    assert PREPARE not in vars(model)


def test_other_models_keep_their_code() -> None:
    """GLM-Image keeps positions of later steps; those of text have no places of images."""
    for name in ("GlmImageForConditionalGeneration", "Gemma3ForConditionalGeneration"):
        assert placing_on_host(tiny_model_of(name)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", CLASSES)
def test_waits_do_not_grow_with_rows(name: str) -> None:
    model, waits = tiny_model_of(name).to("cuda"), list[int]()
    for rows in (1, 8):
        prompts = prompts_with_images(model, *[PROMPTS[1]] * rows)
        prompts = {key: value.to("cuda") for key, value in prompts.items()}
        with fd.enabled(model), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                found = positions_of(model, prompts)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        waits.append(sum("synchroniz" in str(one.message) for one in caught))
        assert {one.device.type for one in found} == {"cuda"}
        assert all(map(torch.equal, found, positions_of(model, prompts)))
    assert waits[0] == waits[1] <= 8
