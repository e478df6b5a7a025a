"""The tokens that each rank stores and computes, where contexts are divided between ranks (Tree Attention).

A run of tokens, such as a segment of node storage, is dealt out to the ranks in turn. What a rank stores of it lies
end to end in its storage, so that any span of the run is one span there too, possibly empty: a rank's forest is
the whole forest with shorter spans, and its kernels read it like any other.

Nodes are dealt out token by token. Every rank then holds the same number of tokens of every span, give or take one,
whatever the lengths, the number of ranks, or the part of a segment that a call reads: a prefix, a window, a path.

Suffixes are dealt out in blocks of `SUFFIX_BLOCK` tokens, so that a step's few new tokens are mostly one rank's, and
what a rank stores are runs of consecutive positions. A segment made of several suffixes, side by side, is dealt out as
these are: it consists of as many runs.

A prefill pass is cut into two pieces a rank, and rank ``r`` of ``P`` computes pieces ``r`` and ``2P - 1 - r``: as a
token attends to those before it, all ranks have the same work. In each layer the keys and values of the pass are
gathered; each rank attends with its queries, and keeps its part of the nodes. Earlier context is gathered by
all ranks alike, whatever each of them reads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._compat import all_gather_vectors
from ..attention.forest import Forest, Path, Span
from ..attention.kv import Partial, Segment, SuffixLengths
from ..attention.launch.step_tables import StepTables
from ..attention.torch_operators.prefill_ops import PackedRuns, Run

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

SUFFIX_BLOCK = 64
"""Consecutive tokens of a suffix on one rank: at least as many as kernels take new tokens in a step, and a multiple of
the tiles in which slim kernels count positions."""


@dataclass(frozen=True)
class Shard:
    """The tokens that one rank stores of runs that are dealt out to all ranks."""

    rank: int
    ranks: int
    block: int = 1  # consecutive tokens of a run on one rank
    run: int | None = None  # tokens of each of the runs that a segment consists of; None for one of any length

    @property
    def counts_sinks(self) -> bool:
        """Whether this rank's partial holds the attention sinks, which are keys of no token: one rank's does."""
        return self.rank == 0

    def count(self, tokens: int) -> int:
        """How many of the first `tokens` tokens this rank stores."""
        if not self.run:
            return self._count_of_run(tokens)
        runs, remainder = divmod(tokens, self.run)
        return runs * self._count_of_run(self.run) + self._count_of_run(remainder)

    def _count_of_run(self, tokens: int) -> int:
        rounds, remainder = divmod(tokens, self.block * self.ranks)
        return rounds * self.block + min(max(0, remainder - self.rank * self.block), self.block)

    def counts(self, tokens: Tensor) -> Tensor:
        """`count` of each number, of one run: integers on any device."""
        period = self.block * self.ranks
        remainder = (tokens % period - self.rank * self.block).clamp(0, self.block)
        return tokens.div(period, rounding_mode="floor") * self.block + remainder

    def stores(self, tokens: Tensor) -> Tensor:
        """Whether this rank stores each of these tokens of one run: bool."""
        return tokens.div(self.block, rounding_mode="floor") % self.ranks == self.rank

    def next_stored(self, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """The first token after the first `lengths` of a run that this rank stores, and the first after it that it
        does not, both counted from there.

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
        """The part of a span that this rank stores, as a span of its storage."""
        first = self.count(span.start)
        return Span(span.segment, first, self.count(span.stop) - first)

    def stored_tokens(self, start: int, stop: int) -> Tensor:
        """The tokens in ``start .. stop - 1`` that this rank stores, in order: int64, on the CPU."""
        tokens = torch.arange(start, stop, device="cpu")
        return tokens[self.stores(tokens % self.run if self.run else tokens)]


WHOLE = Shard(0, 1)
"""The shard of a process that divides nothing."""


def stored_forest(forest: Forest, shard_of: Callable[[int], Shard]) -> Forest:
    """The forest of a rank's stored tokens, over the same rows; nodes of which it has no token are left out.

    `shard_of` gives what the rank stores of a segment, by number.
    """

    def stored(path: Path) -> Path:
        return tuple(part for span in path if (part := shard_of(span.segment).span(span)).length)

    return Forest.from_paths([stored(path) for path in forest.paths])


@lru_cache(maxsize=64)  # all layers of a pass gather the same spans
def order_after_gather(shard: Shard, start: int, stop: int) -> tuple[Tensor, int]:
    """Positions of tokens ``start .. stop - 1`` in the parts of all ranks, gathered and padded alike.

    For each token, rank * longest + index there: ``[length]`` int64, on the CPU; and the longest part's tokens.
    """
    return gathered_order(
        [replace(shard, rank=rank).stored_tokens(start, stop) - start for rank in range(shard.ranks)]
    )


def gathered_order(tokens_by_rank: Sequence[Tensor]) -> tuple[Tensor, int]:
    """As `order_after_gather`, of the tokens that each rank has, int64, each of ``0 .. length - 1`` on one rank."""
    longest, length = max(map(len, tokens_by_rank)), sum(map(len, tokens_by_rank))
    order = torch.empty(length, dtype=torch.long, device="cpu")
    for rank, tokens in enumerate(tokens_by_rank):
        order[tokens] = rank * longest + torch.arange(len(tokens), device="cpu")
    return order, longest


def gathered(own: Tensor, group: ProcessGroup) -> Tensor:
    """Gather `own`, contiguous and of one size on all ranks: ``[ranks, elements]``."""
    found = own.new_empty(group.size() * own.numel())
    all_gather_vectors(found, own.view(-1), group=group)
    return found.view(group.size(), -1)


def gathered_tokens(own: Segment, longest: int, order: Tensor, group: ProcessGroup) -> Segment:
    """Keys and values ``[kv_heads, tokens, head_dim]`` that all processes have; one collective.

    This process's, `own`, are ``[kv_heads, own tokens, head_dim]`` each; `longest` is most tokens of a process, and
    `order` as of `order_after_gather`.
    """
    shapes = [(longest, part.shape[0], part.shape[2]) for part in own]
    sizes = list(map(prod, shapes))
    sent = own.keys.new_zeros(sum(sizes))
    for slot, shape, part in zip(sent.split(sizes), shapes, own, strict=True):
        slot.view(shape)[: part.shape[1]] = part.transpose(0, 1)
    by_rank = gathered(sent, group)
    order = order.to(by_rank.device)
    return Segment._make(
        part.reshape(-1, *shape[1:]).index_select(0, order).transpose(0, 1)
        for part, shape in zip(by_rank.split(sizes, dim=1), shapes, strict=True)
    )


FEWEST_TOKENS = 256
"""Tokens of a rank in a divided pass, at least: fewer are computed on every rank."""


class InPass(NamedTuple):
    """Tokens of the pass before those of a rank in the same run: a context's name."""

    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class DividedPass:
    """The part of a pass that a rank computes."""

    group: ProcessGroup
    tokens: int  # of the whole pass
    indices: Tensor  # [own tokens] int64 ascending, on the CPU: the tokens that this rank computes
    runs: PackedRuns  # these as runs, whose contexts are those of the whole runs and `InPass`
    order: Tensor  # [tokens] int64, on the CPU: for each token, rank and index there, as rank * `longest` + index
    longest: int  # most tokens of a rank

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
        """Indices of those of the `wanted` tokens that this rank computes: among its tokens, and in `wanted`."""
        index_of = {token: index for index, token in enumerate(self.indices.tolist())}
        found = [(index_of[token], index) for index, token in enumerate(wanted) if token in index_of]
        return [computed for computed, _ in found], [index for _, index in found]

    def elements_of_all(self, own: Tensor, indices: Sequence[int], count: int) -> Tensor:
        """Values ``[count, ...]`` of tokens, of which this rank has those at `indices`; one collective."""
        whole = own.new_zeros(count, *own.shape[1:])
        whole[list(indices)] = own
        dist.all_reduce(whole, group=self.group)  # one rank has each, and zeros leave it as it is
        return whole


def tokens_of_rank(tokens: int, rank: int, ranks: int) -> Tensor:
    """The tokens of a pass that a rank computes: ``[tokens]`` int64 ascending, on the CPU."""
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


Contexts = Callable[[Any], Segment]
"""Keys and values of a context of a prefill pass by its name."""


class ReadsContexts:
    """Reads the contexts of one layer in a prefill pass, by default those stored here.

    Attributes:
        in_any_order: Whether contexts may be read several times.
    """

    in_any_order = True

    def __init__(self, stored: Contexts):
        self._stored = stored

    def read(self, name: Any) -> Segment:
        """Keys and values of a context."""
        return self._stored(name)

    def finish(self) -> None:
        """End the pass in this layer."""


class GatheredContexts(ReadsContexts):
    """Gathers spans in one order on all ranks, of which each reads those that its tokens see.

    A rank that left out what it does not read would receive what others gather later.

    Args:
        spans: All that the pass reads, in the order in which they are gathered.
        read_here: Those that this rank reads.
        gather: Gathers keys and values of a span, with all ranks.
        whole: All tokens of the pass.
    """

    def __init__(self, spans: Sequence[Span], read_here: Collection[Span], gather: Contexts, whole: Segment):
        self._left, self._read_here, self._gather, self._whole = deque(spans), read_here, gather, whole
        self._gathered: dict[Span, Segment] = {}
        self._last: Span | None = None
        # The prefill kernel looks at all contexts first, and those that are divided are gathered once each.
        self.in_any_order = len(spans) <= 1

    def read(self, name: Any) -> Segment:
        """Keys and values of a context; of a span, which may be asked for again until the next one is."""
        if isinstance(name, InPass):  # tokens of the pass that other processes compute
            return self._whole.view(Span(0, name.start, name.length))
        if self._last not in (None, name):
            del self._gathered[self._last]
        self._last = name
        while name not in self._gathered:
            one = self._left.popleft()
            found = self._gather(one)
            if one in self._read_here:
                self._gathered[one] = found
        return self._gathered[name]

    def finish(self) -> None:
        while self._left:
            self._gather(self._left.popleft())


class OwnTokens(NamedTuple):
    """The new tokens of a pass that this process stores."""

    spans: Path  # where it stores them
    indices: Tensor  # [tokens] int64, on the CPU: of them among the tokens of the pass


class Undivided:
    """A process that stores nodes and suffixes whole.

    Attributes:
        is_divided: Whether several processes divide them.
        group, ranks: These processes, None for one alone, and their number.
        suffix_shard: What this process stores of each suffix.
    """

    is_divided: ClassVar[bool] = False
    group: ProcessGroup | None = None
    ranks = 1
    suffix_shard: Shard = WHOLE

    @property
    def whose(self) -> str:
        """Whose caches are divided so, for errors."""
        return "this process alone"

    @property
    def tables(self) -> Callable[..., StepTables]:
        """Makes kernel tables for what is stored here; arguments as for `StepTables`."""
        return StepTables

    def is_as(self, other: Undivided) -> bool:
        """Whether the same processes divide another cache."""
        return self.group is other.group

    def shard_of(self, runs: Mapping[int, int], segment: int) -> Shard:
        """The part of a segment that this process stores; `runs` as for `SequenceParallel.shard_of`."""
        return WHOLE

    def stored(self, forest: Forest, runs: Mapping[int, int]) -> Forest:
        """The part of a forest that this process stores; the same object for the same forest."""
        return forest

    def stored_suffixes(self, lengths: SuffixLengths) -> SuffixLengths:
        """Tokens that this process stores of each suffix."""
        return lengths

    def seen(self, before: SuffixLengths, queries: int) -> Tensor | None:
        """Tokens stored here of suffixes that a step's queries see, see `ForestKV`."""
        return None

    def room(self, tokens: int) -> int:
        """Capacity that a suffix of so many tokens needs, the same on all processes, so that storage moves alike."""
        return tokens

    def whole(self, stored: Segment, span: Span, runs: Mapping[int, int]) -> Segment:
        """Keys and values of a whole span, from what this process stores of its segment; a collective if divided."""
        return stored.view(span)

    def merge(self, part: Partial) -> Partial:
        """Attention to all keys, of the partial over those stored here; a collective if divided."""
        return part

    def check_window(self, window: int | None) -> None:
        """Raise `Unsupported` for a window that hides tokens, where contexts are divided."""

    def own_tokens(self, spans: Path) -> OwnTokens | None:
        """Which tokens of a pass over these spans this process stores; None for all."""
        return None

    def read_at_once(self, context: Path) -> Path:
        """A context in spans that fit in memory: where it is divided, each is gathered whole."""
        return context

    def most_of_pass(self, parameters: Iterable[Tensor], max_tokens: int) -> int | None:
        """Most tokens of a pass over new nodes that is divided between processes, each of which may have `max_tokens`.

        None where each computes all tokens, as all do that split the parameters.
        """
        return None

    def part_of(self, runs: Sequence[Run]) -> DividedPass | None:
        """The part of a pass over these runs that this process computes; None for all of it."""
        return None

    def reads(
        self, stored: Contexts, gather: Contexts, whole: Segment, runs: PackedRuns, contexts: Path
    ) -> ReadsContexts:
        """Reads a layer's contexts in a prefill pass.

        They are spans that this process stores, spans that are divided, which `gather` makes by a collective, and the
        pass's own tokens, `whole`. `contexts` are those of all processes.
        """
        return ReadsContexts(stored)


UNDIVIDED = Undivided()
