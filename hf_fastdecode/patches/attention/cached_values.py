"""Interface of the modules that make values of cached tokens."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class CachedValues(Protocol):
    """Values that follow from what a layer caches: `slim_values.SlimValues`, `input_projections.InputValues`."""

    def per_token(self, keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values, ``[rows, tokens, e_v]``, of cached keys (or inputs) and V-coordinates."""

    def averaged(self, probabilities: Tensor, keys: Tensor, coordinates: Tensor) -> Tensor:
        """Values averaged per head, ``[rows, heads, queries, e_v / heads]``, with weights in fp32 that sum to 1."""
