"""Rounding with feedback: rows that are rounded later make up for the errors of those before (GPTQ's algorithm).

It serves matrices, whose products with typical inputs then change little, and cached keys, whose products with a fixed
matrix do. Both are far more exact than rounding to nearest where that amplifies errors in few directions. Any grid
will do: rounding itself is an argument.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

_BLOCK: Final = 128
"""Rows whose corrections are applied to the rest at once, as a matrix product."""


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

    Args:
        gram: ``[rows, rows]``, positive definite: for a matrix the mean of ``x^T x`` over its inputs x, for keys
            ``M M^T`` with the matrix M that they are multiplied by.

    Raises:
        ValueError: `gram` is not positive definite.
    """
    gram = gram.double()
    order = gram.diagonal().argsort(descending=True)  # the strongest first: the most rows remain to compensate
    lower, failed = torch.linalg.cholesky_ex(gram[order][:, order])
    if failed.any():
        raise ValueError("the Gram matrix is not positive definite; add a multiple of the identity")
    return RoundingFeedback(order, torch.linalg.cholesky(torch.cholesky_inverse(lower), upper=True))


def round_with_feedback(
    rows: Tensor, feedback: RoundingFeedback, rounding: Callable[[Tensor, Tensor], Tensor], *, at_once: int = 1
) -> Tensor:
    """Round rows one after another, or a few at once.

    Args:
        rows: ``[rows, columns]``; columns are independent of each other.
        feedback: For these rows.
        rounding: From some rows and their indices to the rounded rows, in fp64.
        at_once: Rows that are rounded together and do not make up for each other: fewer steps, larger errors.

    Returns:
        The rounded rows, fp64.
    """
    left, factor = rows.double()[feedback.order], feedback.factor
    rounded = torch.empty_like(left)
    block = at_once * max(_BLOCK // at_once, 1)
    for start in range(0, len(left), block):
        stop = min(start + block, len(left))
        corrections = torch.empty_like(left[start:stop])
        for first in range(start, stop, at_once):
            last = min(first + at_once, stop)
            rounded[first:last] = rounding(left[first:last], feedback.order[first:last])
            error = left[first:last] - rounded[first:last]
            correction = torch.linalg.solve_triangular(factor[first:last, first:last].mT, error, upper=False)
            left[last:stop] -= factor[first:last, last:stop].mT @ correction
            corrections[first - start : last - start] = correction
        left[stop:] -= factor[start:stop, stop:].mT @ corrections
    return rounded[feedback.order.argsort()]


def shrunk_gram(gram: Tensor, share: float) -> Tensor:
    """A Gram matrix with a share of its mean diagonal added to the diagonal; the identity added to a zero matrix."""
    mean = gram.diagonal().mean()
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    return gram + (share * mean if mean > 0 else 1.0) * identity
