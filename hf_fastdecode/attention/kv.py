"""The keys and values of one layer over a forest, as the attention operators take them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .forest import Forest, Span


class Segment(NamedTuple):
    """Keys and values of a run of tokens: each ``[kv_heads, tokens, head_dim]``, the last dimension contiguous."""

    keys: Tensor
    values: Tensor

    def view(self, span: Span) -> Segment:
        """The span's part of the segment, without a copy."""
        return Segment(self.keys[:, span.start : span.stop], self.values[:, span.start : span.stop])


@dataclass(frozen=True)
class ForestKV:
    """One layer's keys and values: the nodes' once, and each row's suffix.

    Attributes:
        forest: Which rows attend to which spans.
        segments: Storage that the forest's spans point into.
        suffix: ``[rows, kv_heads, capacity, head_dim]`` each of keys and values; row ``i`` holds
            ``suffix_lengths[i]`` tokens from the start, what lies behind them is undefined.
        suffix_lengths: Tokens in each row's suffix.
    """

    forest: Forest
    segments: Sequence[Segment]
    suffix: Segment
    suffix_lengths: Sequence[int]

    def node(self, span: Span) -> Segment:
        """Keys and values of a span, each ``[kv_heads, length, head_dim]``."""
        return self.segments[span.segment].view(span)
