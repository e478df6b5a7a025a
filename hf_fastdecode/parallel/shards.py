"""Which rank stores which tokens, where the keys and values of a context are divided between ranks (Tree Attention).

A segment of node storage is dealt out to the ranks in turn. What a rank
stores of it lies end to end in its own storage, so that any span of the run is one span there too, possibly empty: a
rank's forest is the whole forest with shorter spans, and its kernels read it like any other.

Nodes are dealt out token by token. Every rank then holds the same number of tokens of every span, give or take one,
whatever the lengths, the number of ranks, or the part of a segment that a call reads: a prefix, a window, a path.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..attention.forest import Forest, Path, Span

SUFFIX_BLOCK = 64
"""Consecutive tokens of a suffix on one rank. No call divides suffixes yet: all ranks store them whole."""


@dataclass(frozen=True)
class Shard:
    """What one rank stores of runs that are dealt out to all ranks.

    Attributes:
        rank: Its number.
        ranks: Number of ranks.
        block: Consecutive tokens of a run on one rank.
    """

    rank: int
    ranks: int
    block: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.ranks:
            raise ValueError(f"a rank must be in 0..{self.ranks - 1}, got {self.rank}")
        if self.block < 1:
            raise ValueError(f"a block must have at least 1 token, got {self.block}")

    @property
    def counts_sinks(self) -> bool:
        """Whether this rank's partial holds the attention sinks, which are keys of no token: one rank's does."""
        return self.rank == 0

    def count(self, tokens: int) -> int:
        """How many of a run's first `tokens` tokens this rank stores."""
        rounds, rest = divmod(tokens, self.block * self.ranks)
        return rounds * self.block + min(max(0, rest - self.rank * self.block), self.block)

    def span(self, span: Span) -> Span:
        """Where this rank stores its part of a span."""
        first = self.count(span.start)
        return Span(span.segment, first, self.count(span.stop) - first)

    def places(self, start: int, stop: int) -> Tensor:
        """The tokens in ``start .. stop - 1`` of a run that this rank stores, in order: int64, on the CPU."""
        tokens = torch.arange(start, stop, device="cpu")
        return tokens[tokens // self.block % self.ranks == self.rank]

    def path(self, path: Path) -> Path:
        """A row's path on this rank."""
        return tuple(part for span in path if (part := self.span(span)).length)

    def forest(self, forest: Forest) -> Forest:
        """The forest of what this rank stores, over the same rows; nodes of which it has no token are left out."""
        return Forest.from_paths([self.path(path) for path in forest.paths])


def whole(parts: Sequence[Tensor], block: int = 1, *, dim: int = 0) -> Tensor:
    """A run's tokens in order, from what each rank stores of it, along a dimension of tokens.

    Args:
        parts: By rank, its tokens of the run.
        block: As for `Shard`.
        dim: The dimension of tokens.
    """
    length = sum(part.shape[dim] for part in parts)
    places = [Shard(rank, len(parts), block).places(0, length) for rank in range(len(parts))]
    given, expected = [part.shape[dim] for part in parts], list(map(len, places))
    if given != expected:
        raise ValueError(f"of {length} tokens in blocks of {block} the ranks store {expected}, got {given}")
    return torch.cat(list(parts), dim).index_select(dim, torch.cat(places).argsort().to(parts[0].device))
