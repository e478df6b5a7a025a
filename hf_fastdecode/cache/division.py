"""How processes divide the nodes and suffixes of a cache; a process alone stores all of them (`Undivided`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..attention.forest import Forest, Path, Span
from ..attention.kv import Segment, SuffixLengths
from ..attention.launch.step_tables import StepTables
from ..attention.partial import Partial
from ..attention.torch_operators.prefill_ops import PackedRuns, Run
from ..parallel.divided_pass import DividedPass, GatheredContexts, InPass
from ..parallel.sequence import GATHERED_TOKENS, DividedStepTables, OwnTokens, SequenceParallel, window_is_not_divided
from ..parallel.shards import WHOLE, Shard

Contexts = Callable[[Any], Segment]
"""Keys and values of a context of a prefill pass by its name."""


class Undivided:
    """A process that stores nodes and suffixes whole.

    Attributes:
        parallel: The processes that divide them; None for one alone.
        suffix_shard: What this process stores of each suffix.
        tables: Makes kernel tables for what is stored here; arguments as for `StepTables`.
    """

    parallel: SequenceParallel | None = None
    suffix_shard: Shard = WHOLE
    tables: Callable[..., StepTables] = StepTables

    def shard_of(self, runs: Mapping[int, int], segment: int) -> Shard:
        """What this process stores of a segment; `runs` as for `SequenceParallel.shard_of`."""
        return WHOLE

    def stored(self, forest: Forest, runs: Mapping[int, int]) -> Forest:
        """What this process stores of a forest; the same object for the same forest."""
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

    def part_of(self, runs: Sequence[Run]) -> DividedPass | None:
        """What this process computes of a pass over these runs, which may be divided; None for all of it."""
        return None

    def reads(
        self, stored: Contexts, gather: Contexts, whole: Segment, runs: PackedRuns, contexts: Path
    ) -> ReadsContexts:
        """Reads a layer's contexts in a prefill pass.

        Args:
            stored: Keys and values of a span that this process stores.
            gather: Those of a span that is divided; a collective.
            whole: Those of all tokens of the pass.
            contexts: The spans that any process reads.
        """
        return ReadsContexts(stored)


class ReadsContexts:
    """Reads the contexts of one layer in a prefill pass.

    Attributes:
        read: Keys and values of a context by its name.
        in_any_order: Whether contexts may be read several times.
    """

    def __init__(self, read: Contexts, *, in_any_order: bool = True):
        self.read, self.in_any_order = read, in_any_order

    def finish(self) -> None:
        """End the pass in this layer."""


class _ReadsGathered(ReadsContexts):
    """Gathers contexts that are divided between processes, all of them on each."""

    def __init__(self, gathered: GatheredContexts, whole: Segment, *, in_any_order: bool):
        def read(name: Any) -> Segment:
            if isinstance(name, InPass):  # tokens of the pass that other processes compute
                return whole.view(Span(0, name.start, name.length))
            return gathered(name)

        super().__init__(read, in_any_order=in_any_order)
        self.finish = gathered.finish  # type: ignore[method-assign]


class Divided(Undivided):
    """One of the processes that divide nodes and suffixes (Tree Attention)."""

    parallel: SequenceParallel

    def __init__(self, parallel: SequenceParallel):
        self.parallel, self.suffix_shard = parallel, parallel.suffix_shard
        self.tables = partial(DividedStepTables, parallel)

    def shard_of(self, runs: Mapping[int, int], segment: int) -> Shard:
        return self.parallel.shard_of(runs, segment)

    def stored(self, forest: Forest, runs: Mapping[int, int]) -> Forest:
        return self.parallel.stored(forest, runs)

    def stored_suffixes(self, lengths: SuffixLengths) -> SuffixLengths:
        return self.parallel.stored_suffixes(lengths)

    def seen(self, before: SuffixLengths, queries: int) -> Tensor | None:
        whole = torch.tensor([before.longest], device="cpu") if before.per_row is None else before.per_row.cpu()
        return self.suffix_shard.counts(whole.long()[:, None] + 1 + torch.arange(queries, device="cpu"))

    def room(self, tokens: int) -> int:
        # As the process that stores most, and one more, which a step may write to that stores no token.
        return replace(self.suffix_shard, rank=0).count(tokens) + 1

    def whole(self, stored: Segment, span: Span, runs: Mapping[int, int]) -> Segment:
        return self.parallel.whole(stored, span, runs)

    def merge(self, part: Partial) -> Partial:
        return self.parallel.merge(part)

    def check_window(self, window: int | None) -> None:
        if window is not None:
            raise window_is_not_divided(window)

    def own_tokens(self, spans: Path) -> OwnTokens | None:
        return self.parallel.own_tokens(spans)

    def read_at_once(self, context: Path) -> Path:
        starts = ((span, start) for span in context for start in range(0, span.length, GATHERED_TOKENS))
        return tuple(span[start : start + GATHERED_TOKENS] for span, start in starts)

    def part_of(self, runs: Sequence[Run]) -> DividedPass | None:
        return DividedPass.of(runs, self.parallel.group)

    def reads(
        self, stored: Contexts, gather: Contexts, whole: Segment, runs: PackedRuns, contexts: Path
    ) -> ReadsContexts:
        read_here = {name for run in runs.runs for name in run.context if isinstance(name, Span)}
        # The prefill kernel looks at all contexts first, and those that are divided are gathered once each.
        gathered = GatheredContexts(contexts, read_here, gather)
        return _ReadsGathered(gathered, whole, in_any_order=len(contexts) <= 1)


UNDIVIDED = Undivided()


def division_of(parallel: SequenceParallel | None) -> Undivided:
    """How these processes divide a cache."""
    return UNDIVIDED if parallel is None else Divided(parallel)
