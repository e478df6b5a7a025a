"""Nodes of a layer with latents that steps attend to as keys and values."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from .kv import Scoring
from .partial import Partial


class ExpandedKV(Protocol):
    """Those of one layer, as a step attends to them."""

    def attend(self, query: Tensor, scoring: Scoring, own: Partial) -> Tensor:
        """Attend to the nodes of each row, without a causal rule, and merge with its other keys.

        Args:
            query: ``[rows, heads, queries, key_dim]``.
            own: The partial of the other keys, ``[rows, heads, queries, value_dim]``; ``out`` in the query's dtype.

        Returns:
            ``[rows, heads, queries, value_dim]`` in the query's dtype.
        """
        ...
