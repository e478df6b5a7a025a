"""Names of dtypes in arguments: torch's, short ones, and torch's objects are the same."""

from __future__ import annotations

import pytest
import torch

import hf_fastdecode as fd
from hf_fastdecode.conversion.layers.plan_choice import CACHE_DTYPES, PlanChoice, PlanError
from hf_fastdecode.dtypes import FLOATS, dtype_among, torch_dtype


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
    assert {dtype_among(one, FLOATS) for one in spellings} == {spellings[1]}


@pytest.mark.parametrize("given", ["float64", "half", "", None, 16])
def test_other_values_are_refused(given: object) -> None:
    assert dtype_among(given, FLOATS) is None
    with pytest.raises(ValueError, match=f"float32, bfloat16, float16, or fp32, bf16, fp16, got {given!r}"):
        torch_dtype(given)


@pytest.mark.parametrize("given", ["fp16", "float16", torch.float16, "fp8", "float8_e4m3fn", torch.int8, "auto"])
def test_cache_dtypes_take_every_spelling(given: str | torch.dtype) -> None:
    known = PlanChoice(cache_dtype=given).cache_dtype
    assert known in CACHE_DTYPES
    assert CACHE_DTYPES[known] == (None if given == "auto" else getattr(torch, dtype_among(given, ALL) or ""))
    with pytest.raises(PlanError, match="one of auto, fp16, bf16, fp8, int8, got 'float32'"):
        PlanChoice(cache_dtype="float32")


ALL = ("float16", "float8_e4m3fn", "int8")


def test_embedded_model_takes_every_spelling() -> None:
    assert fd.load_embedded("bf16")[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match="'int8'"):
        fd.load_embedded("int8")
