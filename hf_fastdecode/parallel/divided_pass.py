"""Prefill passes whose tokens are divided between processes.

The tokens of a pass are cut into two pieces a rank, and rank ``r`` of ``P`` computes pieces ``r`` and ``2P - 1 - r``:
as a token attends to those before it, all ranks have the same work. In each layer the keys and values of the pass are
gathered; each rank attends with its own queries, and keeps its own part of the nodes. Earlier context is gathered by
all ranks alike, whatever each of them reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.forest import Span
from ..attention.kv import Segment
from ..attention.torch_operators.prefill_ops import PackedRuns, Run
from .collectives import gathered_tokens
from .shards import gathered_order

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

FEWEST_TOKENS = 256
"""Tokens of a rank in a divided pass, at least: fewer are computed on every rank."""


class InPass(NamedTuple):
    """Tokens of the pass that come before a rank's own in the same run: a context's name."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class DividedPass:
    """What a rank computes of a pass.

    Attributes:
        tokens: Tokens of the whole pass.
        indices: Those that this rank computes: ``[own]`` int64 ascending, on the CPU.
        runs: These as runs, whose contexts are those of the whole runs and `InPass`.
        order: ``[tokens]`` int64, on the CPU: for each token, rank and index there, as rank * `longest` + index.
        longest: Most tokens of a rank.
    """

    group: ProcessGroup
    tokens: int
    indices: Tensor
    runs: PackedRuns
    order: Tensor
    longest: int

    @classmethod
    def of(cls, runs: Sequence[Run], group: ProcessGroup) -> DividedPass | None:
        """The part of this process; None where the pass is too short to divide."""
        tokens, ranks = sum(run.length for run in runs), group.size()
        if tokens < FEWEST_TOKENS * ranks:
            return None
        by_rank = [tokens_of_rank(tokens, rank, ranks) for rank in range(ranks)]
        own = by_rank[group.rank()]
        return cls(group, tokens, own, PackedRuns(cut_runs(runs, own)), *gathered_order(by_rank))

    def segment_of_all(self, own: Segment) -> Segment:
        """Keys and values ``[kv_heads, tokens, head_dim]`` of the pass, given this rank's; one collective."""
        return gathered_tokens(own, self.longest, self.order, self.group)

    def own(self, wanted: Sequence[int]) -> tuple[list[int], list[int]]:
        """Which of some tokens this rank computes: their indices among its own, and in the given list."""
        index_of = {token: index for index, token in enumerate(self.indices.tolist())}
        found = [(index_of[token], index) for index, token in enumerate(wanted) if token in index_of]
        return [computed for computed, _ in found], [index for _, index in found]

    def numbers_of_all(self, own: Tensor, indices: Sequence[int], count: int) -> Tensor:
        """Values ``[count, ...]`` of tokens, of which this rank has those at `indices`; one collective."""
        whole = own.new_zeros(count, *own.shape[1:])
        whole[list(indices)] = own
        dist.all_reduce(whole, group=self.group)  # one rank has each, and zeros leave it as it is
        return whole


def tokens_of_rank(tokens: int, rank: int, ranks: int) -> Tensor:
    """The tokens of a pass that a rank computes: ``[own]`` int64 ascending, on the CPU."""
    ends = [tokens * piece // (2 * ranks) for piece in range(2 * ranks + 1)]
    pieces = rank, 2 * ranks - 1 - rank
    return torch.cat([torch.arange(ends[piece], ends[piece + 1], device="cpu") for piece in pieces])


def cut_runs(runs: Sequence[Run], tokens: Tensor) -> list[Run]:
    """The runs of some tokens of a pass, each with what comes before it."""
    found, start = [], 0
    for run in runs:
        own = tokens[(tokens >= start) & (tokens < start + run.length)]
        breaks = (own.diff() > 1).nonzero().flatten() + 1
        for part in own.tensor_split(breaks) if len(own) else ():
            first = int(part[0])
            before = (InPass(start, first),) if first > start else ()
            found.append(Run(len(part), (*run.context, *before)))
        start += run.length
    return found


class GatheredContexts:
    """Gathers spans in one order on all ranks, of which each reads those that its own tokens see.

    A rank that left out what it does not read would receive what others gather later.

    Args:
        spans: All that the pass reads, in the order in which they are gathered.
        read_here: Those that this rank reads.
        gather: Gathers keys and values of a span, with all ranks.
    """

    def __init__(self, spans: Sequence[Span], read_here: Collection[Span], gather: Callable[[Span], Segment]):
        self._left, self._read_here, self._gather = deque(spans), read_here, gather
        self._gathered: dict[Span, Segment] = {}
        self._last: Span | None = None

    def __call__(self, span: Span) -> Segment:
        """Keys and values of a span, which may be asked for again until the next one is."""
        if self._last not in (None, span):
            del self._gathered[self._last]
        self._last = span
        while span not in self._gathered:
            one = self._left.popleft()
            found = self._gather(one)
            if one in self._read_here:
                self._gathered[one] = found
        return self._gathered[span]

    def finish(self) -> None:
        """Gather what this rank has not read."""
        while self._left:
            self._gather(self._left.popleft())
