"""What all layers of one cache share: the forest, suffixes, and the pass in progress."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn

from ..attention.forest import Forest, Path, Span, joined
from ..attention.kv import Segment, SuffixLengths
from ..attention.launch.dispatch import Choices
from ..attention.launch.plan import HeadShape, own_nodes_dominate
from ..attention.launch.step_tables import StepTables
from ..attention.runs import PackedRuns, Run
from ..attention.torch_operators import Backend, TorchBackend
from ..parallel.ranks import splits_between
from ..parallel.sequence import GATHERED_TOKENS, DividedStepTables, OwnTokens, SequenceParallel
from ..parallel.shards import FEWEST_TOKENS, WHOLE, DividedPass, Shard
from .layers.latent import ExpandedNodes
from .suffixes import Suffixes


@dataclass(frozen=True)
class PrefillItem:
    """A run of tokens to prefill in one forward pass: where they are stored, and the path of those before them."""

    span: Span
    context: Path = ()

    @property
    def position(self) -> int:
        """Position of the first token in its row."""
        return sum(span.length for span in self.context)


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass over a cache: its tokens, what layers read, and where they append; the same for all layers.

    A pass of prefill fills nodes, or suffixes with tokens of prompts. A step appends tokens to each row's suffix.

    Attributes:
        items: Of prefill, the runs of tokens packed into the pass; () of a step.
        spans: Their spans, adjacent ones joined.
        runs: What each of these tokens sees; None of a step.
        contexts: Of nodes that are divided between processes, the spans that the pass reads, on any of them.
        own_tokens: Of the items' tokens, those that this process stores; None for all.
        divided: What this process computes of the pass; None for all of it.
        positions: Of prefill by rows, the positions of the pass's tokens, counted row by row: ``[tokens]`` int64; None
            when tokens are packed into one row, or are one row without padding.
        tensors: Of prefill by transformers' own attention and masks, the pass's rows and their width: layers return
            the keys and values that they are given. Otherwise None.
        before: Of a step, the lengths of suffixes before it; None of prefill.
        queries: Tokens that a step appends to each suffix.
        forest: The cache's forest in a step.
        stored: The part of `forest` that a step reads as this process stores it, see `SharedState.step_forest`.
        capacity: Tokens that suffixes must have room for.
        parallel: The processes between which suffixes are divided, if they are.
    """

    items: Sequence[PrefillItem] = ()
    spans: Path = ()
    runs: PackedRuns | None = None
    contexts: tuple[Span, ...] = ()
    own_tokens: OwnTokens | None = None
    divided: DividedPass | None = None
    positions: Tensor | None = None
    tensors: tuple[int, int] | None = None
    before: SuffixLengths | None = None
    queries: int = 0
    forest: Forest | None = None
    stored: Forest | None = None
    capacity: int = 0
    parallel: SequenceParallel | None = None

    @cached_property
    def lengths(self) -> int | list[int]:
        """Tokens of suffixes that this process stores after a step, see `ForestKV`; waits for a device's lengths."""
        assert self.before is not None
        after = self.before.plus(self.queries)
        return (after if self.parallel is None else self.parallel.stored_suffixes(after)).on_host()

    @cached_property
    def seen(self) -> Tensor | None:
        """Tokens of suffixes stored here that a step's queries see, where processes divide them, see `ForestKV`."""
        if self.parallel is None or (before := self.before) is None:
            return None
        whole = torch.tensor([before.longest], device="cpu") if before.per_row is None else before.per_row.cpu()
        return self.parallel.suffix_shard.counts(whole.long()[:, None] + 1 + torch.arange(self.queries, device="cpu"))


def _positions_in(rows: Tensor, tokens: int) -> Tensor | None:
    """Positions of so many tokens in rows ``[rows, width]``, counted row by row; None in one row without padding."""
    if tokens < rows.numel():
        return rows.flatten().nonzero().flatten()
    return None if len(rows) == 1 else torch.arange(tokens, device=rows.device)


class MadeTables(NamedTuple):
    """Kernel tables, and whether they were made while own nodes held most keys."""

    tables: StepTables
    dominate: bool


@dataclass
class SharedState:
    """State shared by all layers of one cache.

    Attributes:
        forest: Nodes over the rows; None while the number of rows is unknown.
        padded_length: Tokens in the longest row, including the padding of the caller's ``input_ids``.
        max_suffix: Upper bound on suffix tokens, if known; bounds allocation.
        backend: One of `torch_operators.BACKENDS`.
        tables: Kernel inputs other than keys and values, by device and heads of a layer.
        current: The pass in progress; one without items between passes.
        suffix_rows: While prompts are prefilled into suffixes, the row of each segment number that stands for one.
        segment_lengths: Tokens of each storage segment.
        segment_runs: Of segments that are made of suffixes, the tokens of each of these, by number.
        met: The model whose layers the cache has; not kept alive, and unknown to copies.
        position_planes: Planes of positions that the model takes, all equal; 0 for positions without planes.
        counts_tokens: Whether positions behind the rows are those of counted tokens, as they are not behind images
            whose tokens have positions in planes.
        padded_width: Where positions count the padding of prompts, the width of their batch; None where they count
            each row's tokens.
        longest_to_come: Where rows take the places of others, tokens in the longest of all of them by the end of the
            call; else 0.
        expanded: Keys and values of nodes that store latents, as the steps of a call read them; None for latents.
        parallel: The processes between which nodes and suffixes are divided; None where this one stores all. `forest`
            and `suffixes` are the whole ones on each of them, and what is stored here is `parallel`'s part of them.
    """

    forest: Forest | None = None
    suffixes: Suffixes = field(default_factory=Suffixes)
    padded_length: int = 0
    max_suffix: int | None = None
    backend: Backend = "auto"
    choices: Choices = field(default_factory=Choices)
    tables: dict[tuple[torch.device, HeadShape], MadeTables] = field(default_factory=dict)
    current: Pass = field(default_factory=Pass)
    suffix_rows: Mapping[int, int] = field(default_factory=dict)
    segment_lengths: list[int] = field(default_factory=list)
    segment_runs: dict[int, int] = field(default_factory=dict)
    met: ref[nn.Module] | None = None
    position_planes: int = 0
    counts_tokens: bool = True
    padded_width: int | None = None
    longest_to_come: int = 0
    expanded: ExpandedNodes | None = None
    parallel: SequenceParallel | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Addresses are invalid in a copy of the cache, whose tensors are new; weak references cannot be pickled.
        return self.__dict__ | {"tables": {}, "met": None, "expanded": None, "current": Pass()}

    @property
    def torch_backend(self) -> TorchBackend:
        """Backend for PyTorch's operators, which always compute prefill."""
        return "auto" if self.backend == "triton" else self.backend

    @property
    def own_nodes_dominate(self) -> bool:
        """Whether own nodes, where they are used, hold most keys."""
        if self.forest is None or not self.suffixes.in_order:
            return False
        return own_nodes_dominate(self.forest, self.suffixes.longest)

    def prefill(
        self, items: Sequence[PrefillItem], rows: Tensor | None = None, *, divide: bool = False, tensors: bool = False
    ) -> Pass:
        """The pass over these items; arguments as for `SharedContextCache.prefilling`."""
        spans, parallel = joined(item.span for item in items), self.parallel
        runs = [Run(item.span.length, self._read_at_once(item.context)) for item in items]
        divided = DividedPass.of(runs, parallel.group) if divide and parallel is not None else None
        return Pass(
            items,
            spans,
            PackedRuns(runs) if divided is None else divided.runs,
            tuple(dict.fromkeys(span for run in runs for span in run.context if isinstance(span, Span))),
            None if parallel is None else parallel.own_tokens(spans),
            divided,
            None if rows is None else _positions_in(rows, sum(span.length for span in spans)),
            (rows.shape[0], rows.shape[1]) if tensors and rows is not None else None,
        )

    def most_divided(self, parameters: Iterable[Tensor], max_tokens: int) -> int | None:
        """Most tokens of a pass over new nodes that is divided between processes, each of which may have `max_tokens`.

        None where each computes all tokens: those of suffixes, and all if they split the parameters.
        """
        parallel = self.parallel
        if parallel is None or self.suffix_rows or splits_between(parameters, parallel.group):
            return None
        return max_tokens * (parallel.ranks if max_tokens >= FEWEST_TOKENS else 1)

    def step(self, queries: int) -> Pass:
        """The pass that appends so many tokens to every suffix, made by its first layer for all of them."""
        step, before = self.current, self.suffixes.lengths
        if step.before is not before or step.forest is not self.forest or step.queries != queries:
            step = self.current = Pass(
                before=before,
                queries=queries,
                forest=self.forest,
                stored=self.step_forest,
                capacity=self.suffix_room(before.longest + queries),
                parallel=self.parallel,
            )
        return step

    def _read_at_once(self, context: Path) -> Path:
        """A context in spans that fit in memory: where it is divided between processes, each is gathered whole."""
        if self.parallel is None:
            return context
        starts = ((span, start) for span in context for start in range(0, span.length, GATHERED_TOKENS))
        return tuple(span[start : start + GATHERED_TOKENS] for span, start in starts)

    def stored_length(self, segment: int) -> int:
        """Tokens of a segment that this process stores."""
        whole = self.segment_lengths[segment]
        return whole if self.parallel is None else self.parallel.shard_of(self.segment_runs, segment).count(whole)

    @property
    def stored_forest(self) -> Forest | None:
        """The part of `forest` that this process stores; the same object for the same forest."""
        if self.parallel is None or self.forest is None:
            return self.forest
        return self.parallel.stored(self.forest, self.segment_runs)

    @property
    def step_forest(self) -> Forest | None:
        """Of `stored_forest`, the nodes that steps read as they are stored; all but those expanded."""
        forest = self.stored_forest
        return forest if self.expanded is None or forest is None else self.expanded.split(forest).as_stored

    @property
    def expanded_forest(self) -> Forest | None:
        """The other nodes of `stored_forest`, which steps read as keys and values; None if there are none."""
        if self.expanded is None or (forest := self.stored_forest) is None:
            return None
        found = self.expanded.split(forest).expanded
        return found if found.nodes else None

    @property
    def suffix_shard(self) -> Shard:
        """What this process stores of each suffix."""
        return WHOLE if self.parallel is None else self.parallel.suffix_shard

    def suffix_room(self, tokens: int) -> int:
        """Room that a suffix of so many tokens needs, the same on all processes, so that storage moves alike.

        It is that of the process which stores most, and a place more, which a step may write to that stores no token.
        """
        return tokens if self.parallel is None else replace(self.suffix_shard, rank=0).count(tokens) + 1

    def whole(self, stored: Segment, span: Span) -> Segment:
        """Keys and values of a whole span, from what this process stores of its segment; a collective if divided."""
        return stored.view(span) if self.parallel is None else self.parallel.whole(stored, span, self.segment_runs)

    @property
    def make_tables(self) -> Callable[..., StepTables]:
        """Makes kernel tables for what is stored here of nodes and suffixes; arguments as for `StepTables`."""
        return StepTables if self.parallel is None else partial(DividedStepTables, self.parallel)

    @property
    def longest_row(self) -> int:
        """Tokens in the longest row, or an upper bound as for suffixes; waits for the device where suffixes differ."""
        if self.forest is None:
            return 0
        if self.suffixes.lengths.per_row is None:
            return max(self.forest.context_lengths, default=0) + self.suffixes.longest
        lengths = torch.tensor(self.forest.context_lengths, device="cpu") + self.suffixes.per_row(self.forest.rows)
        return max(lengths.tolist(), default=0)

    @property
    def longest_row_bound(self) -> int:
        """At least `longest_row`, without waiting for the device."""
        per_row = self.suffixes.lengths.per_row
        if per_row is None or not per_row.is_cuda:
            return self.longest_row
        return max(self.forest.context_lengths if self.forest is not None else (), default=0) + self.suffixes.longest
