"""Which rank stores which tokens, where keys and values are divided between ranks (Tree Attention).

A run of tokens, such as a segment of node storage, is dealt out to the ranks in turn. What a rank stores of it lies
end to end in its own storage, so that any span of the run is one span there too, possibly empty: a rank's forest is
the whole forest with shorter spans, and its kernels read it like any other.

Nodes are dealt out token by token. Every rank then holds the same number of tokens of every span, give or take one,
whatever the lengths, the number of ranks, or the part of a segment that a call reads: a prefix, a window, a path.

Suffixes are dealt out in blocks of `SUFFIX_BLOCK` tokens, so that a step's few new tokens are mostly one rank's, and
what a rank stores are runs of consecutive positions. A segment made of several suffixes, side by side, is dealt out as
these are: it consists of as many runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from ..attention.forest import Forest, Path, Span

SUFFIX_BLOCK = 64
"""Consecutive tokens of a suffix on one rank: at least as many as kernels take new tokens in a step, and a multiple of
the tiles in which slim kernels count positions."""


@dataclass(frozen=True)
class Shard:
    """What one rank stores of runs that are dealt out to all ranks.

    Attributes:
        rank: Its number.
        ranks: Number of ranks.
        block: Consecutive tokens of a run on one rank.
        run: Tokens of each of the runs that a segment consists of, one after the other; None for one of any length.
    """

    rank: int
    ranks: int
    block: int = 1
    run: int | None = None

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
        """How many of the first `tokens` tokens this rank stores."""
        if not self.run:
            return self._count_of_run(tokens)
        runs, rest = divmod(tokens, self.run)
        return runs * self._count_of_run(self.run) + self._count_of_run(rest)

    def _count_of_run(self, tokens: int) -> int:
        rounds, rest = divmod(tokens, self.block * self.ranks)
        return rounds * self.block + min(max(0, rest - self.rank * self.block), self.block)

    def counts(self, tokens: Tensor) -> Tensor:
        """`count` of each number, of one run: integers on any device."""
        period = self.block * self.ranks
        rest = (tokens % period - self.rank * self.block).clamp(0, self.block)
        return tokens.div(period, rounding_mode="floor") * self.block + rest

    def stores(self, tokens: Tensor) -> Tensor:
        """Whether this rank stores each of these tokens of one run: bool."""
        return tokens.div(self.block, rounding_mode="floor") % self.ranks == self.rank

    def next_stored(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Of the tokens that follow the first `lengths` of a run: the first that this rank stores, and the first
        after it that it does not, both counted from 0.

        Of the ``(ranks - 1) * block + 1`` tokens that follow the first `lengths`, it stores no others.
        """
        ahead = (self.rank * self.block - lengths) % (self.block * self.ranks)  # to the next block's start
        first = torch.where(self.stores(lengths), 0, ahead)
        return first, first + self.block - (lengths + first) % self.block

    def positions(self, stored: int) -> Tensor:
        """Positions in a run of the first `stored` tokens that this rank stores: ``[stored]`` int64, on the CPU."""
        tokens = torch.arange(stored, device="cpu")
        rounds = tokens.div(self.block, rounding_mode="floor")
        return (rounds * self.ranks + self.rank) * self.block + tokens % self.block

    def span(self, span: Span) -> Span:
        """Where this rank stores its part of a span."""
        first = self.count(span.start)
        return Span(span.segment, first, self.count(span.stop) - first)

    def stored_tokens(self, start: int, stop: int) -> Tensor:
        """The tokens in ``start .. stop - 1`` that this rank stores, in order: int64, on the CPU."""
        tokens = torch.arange(start, stop, device="cpu")
        return tokens[self.stores(tokens % self.run if self.run else tokens)]


WHOLE = Shard(0, 1)
"""What a process stores that divides nothing."""


def stored_forest(forest: Forest, shard_of: Callable[[int], Shard]) -> Forest:
    """The forest of what a rank stores, over the same rows; nodes of which it has no token are left out.

    Args:
        forest: The whole one.
        shard_of: What the rank stores of a segment, by number.
    """

    def stored(path: Path) -> Path:
        return tuple(part for span in path if (part := shard_of(span.segment).span(span)).length)

    return Forest.from_paths([stored(path) for path in forest.paths])


@lru_cache(maxsize=64)  # all layers of a pass gather the same spans
def order_after_gather(shard: Shard, start: int, stop: int) -> tuple[Tensor, int]:
    """Where tokens ``start .. stop - 1`` are among what all ranks store of them, each rank's part padded alike.

    Args:
        shard: Any rank's.

    Returns:
        For each token, rank * longest + index there: ``[length]`` int64, on the CPU; and the longest part's tokens.
    """
    return gathered_order(
        [replace(shard, rank=rank).stored_tokens(start, stop) - start for rank in range(shard.ranks)]
    )


def gathered_order(tokens_by_rank: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Where tokens are after a gather; see `order_after_gather`.

    Args:
        tokens_by_rank: Of each rank the tokens that it has, int64, each of ``0 .. length - 1`` on one rank.
    """
    longest, length = max(map(len, tokens_by_rank)), sum(map(len, tokens_by_rank))
    order = torch.empty(length, dtype=torch.long, device="cpu")
    for rank, tokens in enumerate(tokens_by_rank):
        order[tokens] = rank * longest + torch.arange(len(tokens), device="cpu")
    return order, longest
