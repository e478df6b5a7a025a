"""Sequence parallelism: the processes between which the context of each call is divided (Tree Attention).

Each process stores its part of every node and of every suffix. In a decode step all of them have the new tokens' keys
and values; each attends to what it stores, the new tokens that it will store among them, and one collective a layer
merges that of all processes. Whatever else the model computes, each process computes whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ..attention.forest import Forest, Path, Span, joined
from ..attention.kv import Scoring, Segment, SuffixLengths
from ..attention.launch.plan import NO_OWN_NODES, OwnNodes
from ..attention.launch.step_tables import Attend, DescribedStep, NewTokens, StepTables
from ..attention.partial import Partial
from ..errors import Unsupported
from .collectives import gathered_tokens, merge_over, partial_buffer
from .shards import SUFFIX_BLOCK, Shard, order_after_gather, stored_forest

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


GATHERED_TOKENS = 1 << 16
"""Tokens of stored context that a prefill pass gathers at once, at most."""


class OwnTokens(NamedTuple):
    """Which of the new tokens of a pass this process stores.

    Attributes:
        spans: Where it stores them.
        indices: Of them among the tokens of the pass: ``[tokens]`` int64, on the CPU.
    """

    spans: Path
    indices: Tensor


class SequenceParallel:
    """The processes between which contexts are divided, and what this one stores of them.

    Args:
        group: The processes; all of them run the same calls.

    Attributes:
        shard: What this process stores of a segment whose tokens are dealt out one by one.
        suffix_shard: What it stores of each suffix.
    """

    def __init__(self, group: ProcessGroup):
        self.group, self.shard = group, Shard(group.rank(), group.size())
        self.suffix_shard = Shard(group.rank(), group.size(), SUFFIX_BLOCK)
        # The latest ones, and what is stored of them here; another thread may replace them.
        self._forests: tuple[Forest, Forest] | None = None
        self._suffixes: tuple[SuffixLengths, SuffixLengths] | None = None

    @property
    def rank(self) -> int:
        """This process's number in the group."""
        return self.shard.rank

    @property
    def ranks(self) -> int:
        """Number of processes."""
        return self.shard.ranks

    @cached_property
    def global_ranks(self) -> tuple[int, ...]:
        """Numbers of the processes in the default group."""
        return tuple(dist.get_process_group_ranks(self.group))

    def shard_of(self, runs: Mapping[int, int], segment: int) -> Shard:
        """What this process stores of a segment.

        Args:
            runs: Tokens of each suffix in segments that are made of suffixes, by number.
        """
        if (run := runs.get(segment)) is None:
            return self.shard
        return Shard(self.rank, self.ranks, self.suffix_shard.block, run)

    def stored(self, forest: Forest, runs: Mapping[int, int]) -> Forest:
        """What this process stores of a forest; the same object for the same forest. `runs` is as for `shard_of`."""
        known = self._forests
        if known is None or known[0] is not forest:
            known = self._forests = forest, stored_forest(forest, partial(self.shard_of, runs))
        return known[1]

    def stored_suffixes(self, lengths: SuffixLengths) -> SuffixLengths:
        """Tokens that this process stores of each suffix; the same object for the same lengths."""
        known = self._suffixes
        if known is None or known[0] != lengths:
            shard, per_row = self.suffix_shard, lengths.per_row
            stored = SuffixLengths(
                shard.count(lengths.longest),
                None if per_row is None else shard.counts(per_row),
                shard.count(lengths.shortest),
            )
            known = self._suffixes = lengths, stored
        return known[1]

    def own_tokens(self, spans: Path) -> OwnTokens:
        """What this process stores of tokens that a pass computes for these spans, one after the other."""
        indices, before = [torch.empty(0, dtype=torch.long, device="cpu")], 0
        for span in spans:
            indices.append(self.shard.stored_tokens(span.start, span.stop) - span.start + before)
            before += span.length
        return OwnTokens(joined(self.shard.span(span) for span in spans), torch.cat(indices))

    def merge(self, own: Partial) -> Partial:
        """The partial over what all processes store, bitwise the same on all of them: one collective.

        Args:
            own: That over what this process stores; ``(0, -inf)`` where it stores nothing.

        Raises:
            ValueError: Gradients are needed.
        """
        if own.out.requires_grad:
            raise ValueError(
                f"no gradients pass between the {self.ranks} processes that divide a context; run the pass under "
                "torch.no_grad(), or enable the model with sequence_parallel=False"
            )
        buffer = partial_buffer(own.out.shape, own.out.device, own.out.dtype)
        buffer.partial.out.copy_(own.out)
        buffer.partial.lse.copy_(own.lse)
        return merge_over(self.group, buffer)

    def whole(self, stored: Segment, span: Span, runs: Mapping[int, int]) -> Segment:
        """Keys and values of a whole span: ``[kv_heads, length, head_dim]`` each; one collective.

        Args:
            stored: The segment that this process stores of the whole one, ``[kv_heads, tokens, head_dim]`` each.
            runs: As for `shard_of`.
        """
        shard = self.shard_of(runs, span.segment)
        order, longest = order_after_gather(shard, span.start, span.stop)
        return gathered_tokens(stored.view(shard.span(span)), longest, order, self.group)

    def __deepcopy__(self, memo: dict[int, Any]) -> SequenceParallel:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a cache that is divided between {self.ranks} processes cannot be saved: each has a part of it; keep the "
            "prompts, and prefill them again"
        )


class DividedStepTables(StepTables):
    """As `StepTables`, of what this process stores of nodes and suffixes; attention is merged with the others'.

    Args:
        parallel: The processes.
        rows: As for `StepTables`, likewise the others; the forest is what this process stores of the whole one.
    """

    def __init__(
        self,
        parallel: SequenceParallel,
        rows: int,
        layers: Iterable[int],
        forest: Forest,
        device: torch.device,
        own_nodes: OwnNodes = NO_OWN_NODES,
    ):
        super().__init__(rows, layers, forest, device, own_nodes)
        self._parallel = parallel
        # Lengths and new tokens as `forest_decode` reads them, and the lengths of whole suffixes.
        with torch.inference_mode(False):
            self._divided = torch.zeros(4, rows, dtype=torch.int32, device=device)
        self.lengths = self._divided[0]

    @property
    def _kernel_lengths(self) -> Tensor:
        return self._divided[:3]

    def _stored(self, suffixes: SuffixLengths) -> SuffixLengths:
        return self._parallel.stored_suffixes(suffixes)

    def _write_lengths(self, now: DescribedStep) -> None:
        shard, whole = self._parallel.suffix_shard, now.suffixes.per_row
        if whole is None:
            whole = torch.tensor([now.suffixes.longest], dtype=torch.int32, device="cpu")
        first, stop = shard.next_stored(whole)
        table = torch.stack([shard.counts(whole) - now.own_tokens, first, stop, whole])
        rows = self.rows if now.suffixes.per_row is None else len(whole)
        self._divided[:, :rows].copy_(table, non_blocking=True)  # the host need not wait: the copy is staged

    def new_tokens(self) -> NewTokens:
        stored, first, _, whole = self._divided
        return NewTokens(whole.long(), stored.long(), stored + (first == 0))

    def _over_all_keys(self, attend: Attend, query: Tensor, scoring: Scoring, into: Partial | None) -> Tensor:
        """The processes' partials, merged by one collective after all that could raise; `into` is not written."""
        if scoring.window is not None:
            raise window_is_not_divided(scoring.window)
        if scoring.sinks is not None and not self._parallel.suffix_shard.counts_sinks:
            scoring = replace(scoring, sinks=None)
        buffer = partial_buffer(query.shape, query.device)
        attend(scoring, buffer.partial)
        return merge_over(self._parallel.group, buffer, query.dtype).out


def window_is_not_divided(window: int) -> Unsupported:
    """The error of rows that outgrow a window, where their context is divided between processes."""
    return Unsupported(
        f"a window of {window} tokens hides some of a row, whose context is divided between processes",
        "use sequence_parallel=False for such models and lengths",
    )
