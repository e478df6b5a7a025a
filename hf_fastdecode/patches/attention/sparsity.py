"""Softmax sparsity: tokens whose attention weight is below a threshold add nothing (Slim attention, section 3).

Weights that stay are not renormalised. PyTorch's operators multiply zeros as any number, so this saves no time; it
tells what a kernel that skips tokens could save, and at which error.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

import torch
from torch import Tensor

from .cached_values import CachedValues

QUERIES_AT_ONCE: Final = 256
"""Queries of a prompt whose attention weights are in memory at a time."""

_below: ContextVar[list[Tensor] | None] = ContextVar("weights_below_threshold", default=None)


@contextmanager
def counted() -> Iterator[list[Tensor]]:
    """Collects, per use of a threshold, the number of weights below it, hidden tokens' zeros included."""
    counts: list[Tensor] = []
    token = _below.set(counts)
    try:
        yield counts
    finally:
        _below.reset(token)


def without_small(probabilities: Tensor, threshold: float) -> Tensor:
    """Attention weights, ``[rows, heads, queries, tokens]``, with zeros for those below a threshold."""
    small = probabilities < threshold
    if (counts := _below.get()) is not None:
        counts.append(small.sum())
    return probabilities.masked_fill(small, 0)


def averaged(values: CachedValues, probabilities: Tensor, keys: Tensor, coordinates: Tensor) -> Tensor:
    """As `CachedValues.averaged`, for weights that need not sum to 1: constants of the values are weighted too."""
    total = probabilities.sum(-1, keepdim=True)
    shares = probabilities / total.clamp(min=torch.finfo(total.dtype).tiny)
    return values.averaged(shares, keys, coordinates) * total
