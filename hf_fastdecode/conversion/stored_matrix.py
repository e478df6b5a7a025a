"""Matrices in half precision: a scale per column, and rounding whose errors cancel on calibrated inputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_BLOCK: Final = 128
"""Rows whose corrections are applied to the rest at once, as a matrix product."""


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

    def error(self, matrix: Tensor) -> float:
        """Relative error of the stored matrix in the Frobenius norm; 0 for a matrix of zeros."""
        norm = torch.linalg.norm(matrix.double())
        return (torch.linalg.norm(self.double() - matrix.double()) / norm).item() if norm > 0 else 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of values and scales."""
        return self.values.nbytes + self.scales.nbytes


def round_columns(matrix: Tensor, dtype: torch.dtype = torch.float16) -> ScaledColumns:
    """Round each entry to the nearest.

    Args:
        matrix: ``[rows, columns]``, finite.
        dtype: Of storage.
    """
    scales = _column_scales(matrix)
    return ScaledColumns((matrix.double() / scales.double()).to(dtype), scales)


@dataclass(frozen=True)
class RoundingFeedback:
    """How the rounding error of one row of a matrix is made up for by the rows below it.

    Attributes:
        order: ``[rows]``, in which rows are rounded.
        factor: ``[rows, rows]``, fp64, upper triangular, in that order: ``factor^T factor`` is the inverse of the
            inputs' Gram matrix.
    """

    order: Tensor
    factor: Tensor


def rounding_feedback(gram: Tensor) -> RoundingFeedback:
    """The feedback that is best for typical inputs x of a product ``x matrix``.

    Args:
        gram: ``[rows, rows]``, positive definite: mean of ``x^T x``.

    Raises:
        ValueError: `gram` is not positive definite.
    """
    gram = gram.double()
    order = gram.diagonal().argsort(descending=True)  # the strongest first: the most rows remain to compensate
    lower, failed = torch.linalg.cholesky_ex(gram[order][:, order])
    if failed.any():
        raise ValueError("the Gram matrix of inputs is not positive definite; add a multiple of the identity")
    return RoundingFeedback(order, torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True))


def round_columns_for(matrix: Tensor, feedback: RoundingFeedback, dtype: torch.dtype = torch.float16) -> ScaledColumns:
    """Round so that products with typical inputs change little, rather than each entry.

    Rows are rounded one after another, and the error of each is compensated by those that are still to come (the
    algorithm of GPTQ, here in fp64 and with a floating-point grid). Rows of a matrix from keys to values multiply
    strongly correlated coordinates, so this takes away most of the error that rounding to the nearest makes.

    Args:
        matrix: ``[rows, columns]``, finite.
        feedback: Of its inputs.
        dtype: Of storage.
    """
    scales, factor = _column_scales(matrix), feedback.factor
    left = (matrix.double() / scales.double())[feedback.order]
    rounded = torch.empty_like(left)
    for start in range(0, len(left), _BLOCK):
        stop = min(start + _BLOCK, len(left))
        errors = torch.empty_like(left[start:stop])
        for row in range(start, stop):
            rounded[row] = left[row].to(dtype).double()
            error = (left[row] - rounded[row]) / factor[row, row]
            left[row + 1 : stop] -= factor[row, row + 1 : stop, None] * error
            errors[row - start] = error
        left[stop:] -= factor[start:stop, stop:].mT @ errors
    return ScaledColumns(rounded[feedback.order.argsort()].to(dtype), scales)


def _column_scales(matrix: Tensor) -> Tensor:
    largest = matrix.double().abs().amax(0)
    exponent = torch.where(largest > 0, largest, 1.0).log2().floor()
    return torch.exp2(exponent.clamp(-126, 127)).float()  # normal numbers of fp32
