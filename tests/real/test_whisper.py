"""Slim forms of a trained Whisper: what it hears stays the same."""

from __future__ import annotations

from copy import deepcopy

import pytest
import torch
from torch import Tensor

import hf_fastdecode as fd

from .speech import speak
from .trained_whisper import features, texts, tokenizer, trained_whisper

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "Twenty seven engineers measured the kernel on a rainy Monday.",
    "Please write a function that returns the largest number of a list.",
)
HEARD = ("brown fox", "engineers measured the kernel on a rainy Monday", "a function that returns the largest number")
OTHER_TEXT = (
    "The train to the coast leaves at seven in the morning. Nobody had told the cook, who was still asleep, and so "
    "there was no bread on board when the rain began."
)


@pytest.fixture(scope="module")
def sounds() -> Tensor:
    return features(*map(speak, SENTENCES))


@pytest.fixture(scope="module")
def calibration() -> dict[str, Tensor]:
    """Another text, spoken and written."""
    return {"calibration": torch.tensor(tokenizer()(OTHER_TEXT)["input_ids"]), "features": features(speak(OTHER_TEXT))}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transcripts_are_those_of_the_ordinary_model(
    dtype: torch.dtype, sounds: Tensor, calibration: dict[str, Tensor]
) -> None:
    model = deepcopy(trained_whisper()).to(dtype)
    expected = texts(model.generate(sounds.to(dtype), max_new_tokens=40))
    for heard, transcript in zip(HEARD, expected, strict=True):
        assert heard in transcript
    slim = fd.to_slim(model, **calibration)
    assert {plan["plan"] for plan in slim.config.slim_layers} == {"x", "e"}
    assert texts(slim.generate(sounds.to(dtype), max_new_tokens=40)) == expected
