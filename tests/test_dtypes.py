"""Names of dtypes in arguments: torch's, short ones, and torch's objects are the same."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.conversion.layer_converter import PlanChoice
from hf_fastdecode.dtypes import parse_dtype, torch_dtype


@pytest.mark.parametrize(
    "spellings",
    [
        ("fp32", "float32", "torch.float32", torch.float32),
        ("fp16", "float16", "torch.float16", torch.float16),
        ("bf16", "bfloat16", "torch.bfloat16", torch.bfloat16),
    ],
    ids=lambda spellings: spellings[0],
)
def test_spellings_of_one_dtype_are_equal(spellings: tuple[object, ...]) -> None:
    assert {torch_dtype(one) for one in spellings} == {spellings[-1]}
    assert {parse_dtype(one) for one in spellings} == {spellings[1]}


@pytest.mark.parametrize("given", ["float64", "half", "", None, 16, "auto"])
def test_other_values_are_refused(given: object) -> None:
    with pytest.raises(ValueError, match=rf"float32 \(fp32\), bfloat16 \(bf16\), .* got {given!r}"):
        torch_dtype(given)


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("fp16", "float16"),
        (torch.float16, "float16"),
        ("fp8", "float8_e4m3fn"),
        ("float8_e4m3fn", "float8_e4m3fn"),
        (torch.int8, "int8"),
        ("auto", "auto"),
    ],
    ids=str,
)
def test_cache_dtypes_take_every_spelling(given: str | torch.dtype, name: str) -> None:
    assert PlanChoice(cache_dtype=given).cache_dtype == name
    with pytest.raises(ValueError, match=r"`cache_dtype` must be one of auto, float16 .* got 'float32'"):
        PlanChoice(cache_dtype="float32")


def test_embedded_model_takes_every_spelling() -> None:
    assert fd.load_embedded("bf16")[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="'int8'"):
        fd.load_embedded("int8")
