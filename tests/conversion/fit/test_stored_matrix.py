"""Matrices in half precision."""

from __future__ import annotations

import pytest
import torch

from hf_fastdecode.conversion.fit import round_columns, round_columns_for, rounding_feedback

from .layers import relative, spectrum, text

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])


@DTYPES
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_columns_of_any_size_keep_their_bits(size: float, dtype: torch.dtype) -> None:
    matrix = text(63) * size * torch.logspace(-6, 6, 48, dtype=torch.float64)
    matrix[:, 7] = 0
    stored = round_columns(matrix, dtype)
    assert torch.equal(stored.scales.log2(), stored.scales.log2().round())  # powers of two round nothing
    assert stored.values.double().abs().max() <= 2
    bound = torch.finfo(dtype).eps / 2 * matrix.abs().amax(0)
    assert ((stored.double() - matrix).abs() <= bound).all()
    assert 0 < stored.error(matrix) <= torch.finfo(dtype).eps / 2
    assert stored.nbytes == 63 * 48 * dtype.itemsize + 48 * 4


def test_matrices_without_entries_or_of_zeros() -> None:
    assert round_columns(torch.zeros(3, 2)).error(torch.zeros(3, 2)) == 0
    assert round_columns(torch.zeros(48, 0)).values.shape == (48, 0)
    assert round_columns_for(torch.zeros(48, 0), rounding_feedback(torch.eye(48))).values.shape == (48, 0)


@DTYPES
@pytest.mark.parametrize("rows", [1, 63, 300])
def test_uncorrelated_inputs_round_to_nearest(rows: int, dtype: torch.dtype) -> None:
    matrix = text(rows)
    feedback = rounding_feedback(torch.eye(rows) * torch.rand(rows, generator=torch.Generator().manual_seed(0)))
    assert torch.equal(round_columns_for(matrix, feedback, dtype).values, round_columns(matrix, dtype).values)


@DTYPES
@pytest.mark.parametrize("rows", [63, 300])
def test_errors_cancel_on_typical_inputs(rows: int, dtype: torch.dtype) -> None:
    mix = spectrum(rows, rows, 1e3, torch.Generator().manual_seed(0))
    matrix, inputs = text(rows), text(1000, rows, seed=2) @ mix
    feedback = rounding_feedback(mix.mT @ mix)
    stored, nearest = round_columns_for(matrix, feedback, dtype), round_columns(matrix, dtype)
    error, error_of_nearest = (relative(inputs @ one.double(), inputs @ matrix) for one in (stored, nearest))
    # Each row leaves what no row after it can make up for; rounding to nearest leaves the whole error of each.
    left = (feedback.factor.diagonal() ** -2).sum() / mix.square().sum()
    assert error / error_of_nearest == pytest.approx(left.sqrt().item(), rel=0.1)
    assert left.sqrt() < 0.5
    assert stored.error(matrix) >= nearest.error(matrix)


def test_degenerate_gram_is_refused() -> None:
    with pytest.raises(ValueError, match="Gram matrix is not positive definite; add a multiple"):
        rounding_feedback(torch.zeros(3, 3))
