"""Matrices in half precision: a scale per column, and rounding whose errors cancel on calibrated inputs (GPTQ)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_BLOCK: Final = 128
"""Rows whose corrections are applied to the rest at once, as a matrix product."""


def matrix_dtype(model_dtype: torch.dtype) -> torch.dtype:
    """Dtype of a slim layer's matrices: fp16 for models in half precision (bf16 would spoil the values)."""
    return torch.float16 if model_dtype.itemsize == 2 else torch.float32


@dataclass(frozen=True)
class RoundingFeedback:
    """Order and factor by which later rows compensate the rounding errors of earlier ones.

    Attributes:
        order: ``[rows]``, in which rows are rounded.
        factor: ``[rows, rows]``, fp64, upper triangular, in that order: ``factor^T factor`` is the inverse of the Gram
            matrix that errors are measured by.
    """

    order: Tensor
    factor: Tensor


def rounding_feedback(gram: Tensor) -> RoundingFeedback:
    """The feedback that keeps ``trace(error^T gram error)`` small.

    `gram`, ``[rows, rows]``, is the mean of ``x^T x`` over the matrix's inputs x; ValueError unless it is positive
    definite.
    """
    gram = gram.double()
    order = gram.diagonal().argsort(descending=True)  # the strongest first: the most rows remain to compensate
    lower, failed = torch.linalg.cholesky_ex(gram[order][:, order])
    if failed.any():
        raise ValueError("the Gram matrix is not positive definite; add a multiple of the identity")
    return RoundingFeedback(order, torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True))


def round_with_feedback(
    rows: Tensor, feedback: RoundingFeedback, rounding: Callable[[Tensor, Tensor], Tensor]
) -> Tensor:
    """Round rows one after another, each with the corrections for those before (GPTQ's algorithm), in fp64.

    Columns are independent of each other. `rounding` makes the rounded row of a row ``[1, columns]`` and its index;
    any grid will do.
    """
    left, factor = rows.double()[feedback.order], feedback.factor
    rounded = torch.empty_like(left)
    for start in range(0, len(left), _BLOCK):
        stop = min(start + _BLOCK, len(left))
        corrections = torch.empty_like(left[start:stop])
        for row in range(start, stop):
            rounded[row : row + 1] = rounding(left[row : row + 1], feedback.order[row : row + 1])
            correction = (left[row] - rounded[row]) / factor[row, row]
            left[row + 1 : stop] -= factor[row, row + 1 : stop, None] * correction
            corrections[row - start] = correction
        left[stop:] -= factor[start:stop, stop:].mT @ corrections
    return rounded[feedback.order.argsort()]


def shrunk_gram(gram: Tensor, share: float) -> Tensor:
    """A Gram matrix with a share of its mean diagonal added to the diagonal; the identity added to a zero matrix."""
    mean = gram.diagonal().mean()
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return gram + (share * mean if mean > 0 else 1.0) * identity


@dataclass(frozen=True)
class ScaledColumns:
    """A matrix as ``values * scales``.

    Scales are powers of two that bring the largest entry of each column into [1, 2): multiplying by them rounds
    nothing, no entry leaves the range, and columns of small entries keep their bits.

    Attributes:
        values: ``[rows, columns]``, in the dtype of storage.
        scales: ``[columns]``, fp32.
    """

    values: Tensor
    scales: Tensor

    def double(self) -> Tensor:
        """The matrix that is stored, ``[rows, columns]``, fp64."""
        return self.values.double() * self.scales.double()


def round_columns(matrix: Tensor, feedback: RoundingFeedback | None = None, *, dtype: torch.dtype) -> ScaledColumns:
    """Round a matrix ``[rows, columns]``, which is finite.

    With the feedback of its inputs, products with typical inputs change little; without, each entry is rounded to the
    nearest. Rows of a matrix from keys to values multiply strongly correlated coordinates, so that errors of one row
    can be made up for in others.
    """
    largest = matrix.double().abs().amax(0)
    exponent = torch.where(largest > 0, largest, 1.0).log2().floor()
    scales = torch.exp2(exponent.clamp(-126, 127)).float()  # normal numbers of fp32
    values = matrix.double() / scales.double()
    if feedback is not None:
        values = round_with_feedback(values, feedback, lambda row, _: row.to(dtype).double())
    return ScaledColumns(values.to(dtype), scales)
