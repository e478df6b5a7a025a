"""Matrices in half precision: a scale per column, and rounding whose errors cancel on calibrated inputs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .feedback_rounding import RoundingFeedback, round_with_feedback


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


def round_columns_for(matrix: Tensor, feedback: RoundingFeedback, dtype: torch.dtype = torch.float16) -> ScaledColumns:
    """Round so that products with typical inputs change little, rather than each entry.

    Rows of a matrix from keys to values multiply strongly correlated coordinates, so that errors of one row can be
    made up for in others (`round_with_feedback`).

    Args:
        matrix: ``[rows, columns]``, finite.
        feedback: Of its inputs.
        dtype: Of storage.
    """
    scales = _column_scales(matrix)
    scaled = matrix.double() / scales.double()
    rounded = round_with_feedback(scaled, feedback, lambda rows, _: rows.to(dtype).double())
    return ScaledColumns(rounded.to(dtype), scales)


def _column_scales(matrix: Tensor) -> Tensor:
    largest = matrix.double().abs().amax(0)
    exponent = torch.where(largest > 0, largest, 1.0).log2().floor()
    return torch.exp2(exponent.clamp(-126, 127)).float()  # normal numbers of fp32
