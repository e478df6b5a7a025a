"""Slim forms of a trained Whisper: what it hears stays the same."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import hf_fastdecode as fd
from hf_fastdecode.conversion.convert import Settings, convert_checkpoint

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


def test_a_bf16_checkpoint_gets_the_plan_of_the_loaded_model(tmp_path: Path, calibration: dict[str, Tensor]) -> None:
    model = deepcopy(trained_whisper()).bfloat16()
    source, said, text = tmp_path / "source", tmp_path / "said.safetensors", tmp_path / "said.txt"
    model.save_pretrained(source)
    tokenizer().save_pretrained(source)
    save_file({"input_features": calibration["features"]}, said)
    text.write_text(OTHER_TEXT, encoding="utf-8")
    report = convert_checkpoint(Settings(str(source), tmp_path / "slim", calibration=said, transcript=text))
    assert [layer["plan"] for layer in report["layers"]] == [
        layer["plan"] for layer in fd.to_slim(model, **calibration).config.slim_layers
    ]
    assert {layer["plan"] for layer in report["layers"]} == {"x", "e"}
    assert report["saved"] > 0.85
