"""Slim decoders with an encoder share context: tokens are those of the slim model alone, in fp32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_fastdecode as fd
from hf_fastdecode._compat import CACHE
from hf_fastdecode.conversion.to_slim import to_slim

from .encoder_decoder_models import encoder_decoder, encoder_decoder_pair, read_by
from .slim_models import TEXT

SAMPLING = {"do_sample": True, "top_k": 0, "num_return_sequences": 3}
BEAMS = {"do_sample": False, "num_beams": 3, "num_return_sequences": 2}


def generate(slim: PreTrainedModel, **arguments: Any) -> Any:
    torch.manual_seed(0)
    return slim.generate(**read_by(slim), **{"max_new_tokens": 12, "no_repeat_ngram_size": 2, **arguments})


def check(slim: PreTrainedModel, **arguments: Any) -> None:
    expected = generate(slim, **arguments)
    with fd.enabled(slim, min_saved_tokens=1):
        assert torch.equal(generate(slim, **arguments), expected)
        report = fd.explain(slim).last_call
    assert report is not None
    assert (report.path, report.inputs) == ("shared", 2), report.reason


# With plan mixed, layers of the ordinary model stand beside slim ones.
@pytest.mark.parametrize("arguments", [SAMPLING, BEAMS], ids=["samples", "beams"])
@pytest.mark.parametrize(("name", "plan"), [("t5", "mixed"), ("t5", "e"), ("whisper", "k+r"), ("bart", "x")])
def test_tokens_are_those_of_the_slim_model(name: str, plan: str, arguments: dict[str, Any]) -> None:
    slim = encoder_decoder_pair(name, plan)[1]
    check(slim, **arguments)


def test_eight_bits_are_read_as_they_are_cached() -> None:
    slim = to_slim(encoder_decoder("whisper"), TEXT, plan=(("x", 0), ("k+r", 8)) * 2, cache_dtype="int8")
    check(slim, **SAMPLING)


def test_keys_and_values_are_stored_once_for_each_input() -> None:
    slim = encoder_decoder_pair("bart", "k")[1]
    with fd.enabled(slim, min_saved_tokens=1):
        stored = generate(slim, **SAMPLING, return_dict_in_generate=True)[CACHE].inputs
    shown = int(read_by(slim)["attention_mask"].sum())
    assert {part.shape for segments in stored.segments.values() for part in segments[0]} == {(4, shown, 16)}


def test_small_weights_that_are_skipped_run_stock() -> None:
    slim = to_slim(encoder_decoder("t5"), TEXT, plan="k")
    slim.config.slim_sparsity_threshold = 0.01
    expected = generate(slim, **SAMPLING)
    with fd.enabled(slim, min_saved_tokens=1):
        assert torch.equal(generate(slim, **SAMPLING), expected)
        report = fd.explain(slim).last_call
    assert report is not None
    assert (report.path, "sparsity threshold" in report.reason) == ("stock", True)
