"""Matrices in half precision, and rounding with feedback."""

from __future__ import annotations

import pytest
import torch

from hf_fastdecode.conversion.fit.rounding import round_columns, round_with_feedback, rounding_feedback

from .layers import relative, spectrum, text

DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])


@DTYPES
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_columns_of_any_size_keep_their_bits(size: float, dtype: torch.dtype) -> None:
    matrix = text(63) * size * torch.logspace(-6, 6, 48, dtype=torch.float64)
    matrix[:, 7] = 0
    stored = round_columns(matrix, dtype=dtype)
    assert torch.equal(stored.scales.log2(), stored.scales.log2().round())  # powers of two round nothing
    assert stored.values.double().abs().max() <= 2
    bound = torch.finfo(dtype).eps / 2 * matrix.abs().amax(0)
    assert ((stored.double() - matrix).abs() <= bound).all()
    assert 0 < relative(stored.double(), matrix) <= torch.finfo(dtype).eps / 2
    assert (stored.values.dtype, stored.scales.dtype) == (dtype, torch.float32)


def test_matrices_without_entries_or_of_zeros() -> None:
    assert not round_columns(torch.zeros(3, 2), dtype=torch.float16).double().any()
    for feedback in (None, rounding_feedback(torch.eye(48))):
        assert round_columns(torch.zeros(48, 0), feedback, dtype=torch.float16).values.shape == (48, 0)


@DTYPES
@pytest.mark.parametrize("rows", [1, 63, 300])
def test_uncorrelated_inputs_round_to_nearest(rows: int, dtype: torch.dtype) -> None:
    matrix = text(rows)
    feedback = rounding_feedback(torch.eye(rows) * torch.rand(rows, generator=torch.Generator().manual_seed(0)))
    with_feedback, nearest = (round_columns(matrix, one, dtype=dtype) for one in (feedback, None))
    assert torch.equal(with_feedback.values, nearest.values)


@DTYPES
@pytest.mark.parametrize("rows", [63, 300])
def test_errors_cancel_on_typical_inputs(rows: int, dtype: torch.dtype) -> None:
    mix = spectrum(rows, rows, 1e3, torch.Generator().manual_seed(0))
    matrix, inputs = text(rows), text(1000, rows, seed=2) @ mix
    feedback = rounding_feedback(mix.mT @ mix)
    stored, nearest = (round_columns(matrix, one, dtype=dtype) for one in (feedback, None))
    error, error_of_nearest = (relative(inputs @ one.double(), inputs @ matrix) for one in (stored, nearest))
    # Each row leaves what no row after it can make up for; rounding to nearest leaves the whole error of each.
    left = (feedback.factor.diagonal() ** -2).sum() / mix.square().sum()
    assert error / error_of_nearest == pytest.approx(left.sqrt().item(), rel=0.1)
    assert left.sqrt() < 0.5
    assert relative(stored.double(), matrix) >= relative(nearest.double(), matrix)


def test_degenerate_gram_is_refused() -> None:
    with pytest.raises(ValueError, match="Gram matrix is not positive definite; add a multiple"):
        rounding_feedback(torch.zeros(3, 3))


def test_feedback_is_the_best_answer_to_an_error() -> None:
    """The row that is rounded last makes up for the other as least squares would, without a grid of its own."""
    gram = torch.tensor([[4.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    target = torch.tensor([[0.3], [0.4]], dtype=torch.float64)
    rounded = round_with_feedback(
        target, rounding_feedback(gram), lambda rows, at: torch.where((at == 0)[:, None], rows.round(), rows)
    )
    assert rounded[0] == 0
    assert rounded[1].item() == pytest.approx(0.4 + 0.3 * 1.0 / 1.0)  # gram[1, 0] / gram[1, 1]


def test_products_change_less_than_with_rounding_to_nearest() -> None:
    """Of more rows than are corrected at once."""
    mix = spectrum(300, 300, 1e3, torch.Generator().manual_seed(0))
    feedback, rows = rounding_feedback(mix.mT @ mix), text(300)
    rounded = round_with_feedback(rows, feedback, lambda part, _: part.half().double())
    error, error_of_nearest = (relative(mix @ one, mix @ rows) for one in (rounded, rows.half().double()))
    assert error < error_of_nearest / 2
    assert torch.equal(rounded[feedback.order[0]], rows.half().double()[feedback.order[0]])
