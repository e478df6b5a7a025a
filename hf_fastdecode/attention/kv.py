"""Keys and values of one layer over a forest: arguments of the attention operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .forest import Forest, Span


@dataclass(frozen=True)
class Scoring:
    """Score options of a layer.

    Attributes:
        scale: Factor on the scores.
        softcap: When given, scores become ``softcap * tanh(scores / softcap)``.
        window: When given, a query sees only the last ``window`` tokens up to and including its own.
        sinks: ``[heads]`` fp32: when given, one more score per query head in the softmax's denominator, without
            a value.
        distances: ``[heads, distances]`` fp32: when given, what is added to the score of a key by how many tokens it
            is before the query; the last for all farther ones.
    """

    scale: float
    softcap: float | None = None
    window: int | None = None
    sinks: Tensor | None = None
    distances: Tensor | None = None

    @property
    def report_note(self) -> str:
        """Text for reports: what there is beyond causal attention; empty if nothing."""
        window = "" if self.window is None else f", within a window of {self.window} tokens"
        softcap = "" if self.softcap is None else f", with a soft cap of {self.softcap:g}"
        biases = "" if self.distances is None else ", with biases by distance"
        return window + softcap + ("" if self.sinks is None else ", with sinks") + biases


class Segment(NamedTuple):
    """Keys and values of stored tokens, of equal strides, the last dimension contiguous.

    Those of a run of tokens are ``[kv_heads, tokens, head_dim]`` each; those of all rows' suffixes are
    ``[rows, kv_heads, capacity, head_dim]`` each, and have no `view`.
    """

    keys: Tensor
    values: Tensor

    def view(self, span: Span) -> Segment:
        """A view of the span's tokens."""
        if span.start == 0 and span.stop == self.keys.shape[1]:
            return self
        return Segment(self.keys[:, span.start : span.stop], self.values[:, span.start : span.stop])


@dataclass(frozen=True, eq=False)
class SuffixLengths:
    """Tokens in each row's suffix, with bounds that the host knows.

    Attributes:
        longest: At least the longest suffix's tokens.
        per_row: ``[rows]`` int32, on the CPU if the host knows them; None while all suffixes have `longest` tokens.
            Other lengths are always another tensor, so equal lengths are recognized without reading it.
        shortest: At most the shortest suffix's tokens.
    """

    longest: int = 0
    per_row: Tensor | None = None
    shortest: int = 0

    @classmethod
    def of(cls, length: int) -> SuffixLengths:
        """All suffixes of one length."""
        return cls(length, None, length)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SuffixLengths):
            return NotImplemented
        return self.longest == other.longest and self.per_row is other.per_row

    def plus(self, tokens: int) -> SuffixLengths:
        """These with `tokens` more in every suffix."""
        per_row = None if self.per_row is None else self.per_row + tokens
        return SuffixLengths(self.longest + tokens, per_row, self.shortest + tokens)

    def on_host(self) -> int | list[int]:
        """The same lengths for `ForestKV`; synchronizes with the device if `per_row` is given."""
        return self.longest if self.per_row is None else self.per_row.tolist()


@dataclass(frozen=True)
class ForestKV:
    """One layer's keys and values: each node's once, and each row's suffix.

    Attributes:
        forest: Which rows attend to which spans.
        segments: Storage that the forest's spans point into, by number.
        suffix: ``[rows, kv_heads, capacity, head_dim]`` each of keys and values; row ``i`` holds
            ``suffix_lengths[i]`` tokens from the start; the rest is undefined.
        suffix_lengths: Tokens in each row's suffix; one number when all are equal.
        seen: ``[rows or 1, queries]`` int64, on the CPU: how many tokens of its row's suffix each query of the step
            sees; None where suffixes end with the queries' own tokens, which then see those up to theirs. Given where
            suffixes are divided between processes.
    """

    forest: Forest
    segments: Sequence[Segment] | Mapping[int, Segment]
    suffix: Segment
    suffix_lengths: int | Sequence[int]
    seen: Tensor | None = None

    @property
    def suffix_bounds(self) -> tuple[int, int]:
        """The shortest and the longest suffix, in tokens."""
        if isinstance(self.suffix_lengths, int):
            return self.suffix_lengths, self.suffix_lengths
        return min(self.suffix_lengths, default=0), max(self.suffix_lengths, default=0)

    def lengths(self) -> list[int]:
        """Tokens in each row's suffix."""
        if isinstance(self.suffix_lengths, int):
            return [self.suffix_lengths] * self.forest.rows
        return list(self.suffix_lengths)

    def seen_by(self, queries: int) -> Tensor:
        """How many tokens of its row's suffix each of a row's last `queries` sees: ``[rows, queries]`` int64, CPU."""
        if self.seen is not None:
            return self.seen.expand(self.forest.rows, -1)
        lengths = torch.tensor(self.lengths(), dtype=torch.long, device="cpu")
        return lengths[:, None] - queries + 1 + torch.arange(queries, device="cpu")

    def node(self, span: Span) -> Segment:
        """Keys and values of a span, each ``[kv_heads, length, head_dim]``."""
        return self.segments[span.segment].view(span)
