"""The pass in progress over a cache, how processes divide the cache, and what its layers share besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol
from weakref import ref

import torch
from torch import Tensor, nn

from ..attention.forest import Forest, Path, Span, joined
from ..attention.kv import ExpandedKV, Scoring, Segment, SuffixLengths
from ..attention.launch.plan import HeadShape, own_nodes_dominate
from ..attention.launch.step_tables import StepTables, TablesByShape
from ..attention.torch_operators import Backend, TorchBackend
from ..attention.torch_operators.prefill_ops import PackedRuns, Run
from ..parallel.shards import UNDIVIDED, DividedPass, OwnTokens, Undivided
from .layers.latent import MOST_STEPS_EXPECTED, ExpandedNodes, LatentStorage, expanded_where_it_pays
from .storage import Suffixes


@dataclass(frozen=True)
class PrefillItem:
    """A run of tokens to prefill in one forward pass: where they are stored, and the path of those before them."""

    span: Span
    context: Path = ()

    @property
    def position(self) -> int:
        return sum(span.length for span in self.context)


class Padded(Protocol):
    """The buffers of a captured prefill pass, and its attention (`captured_prefill.PaddedPass`)."""

    def write(self, layer: int, parts: Segment) -> Segment:
        """Write a layer's tokens, ``[rows, heads, tokens, width]`` each; returns them as the layer attends to them."""
        ...

    def attend(self, layer: int, tokens: Segment, query: Tensor, scoring: Scoring) -> Tensor:
        """Attend as `SharedKV.attend`, to tokens that `write` returned, as keys and values."""
        ...


@dataclass(frozen=True, eq=False)
class Pass:
    """A forward pass over a cache: its tokens, what layers read, and where they append; the same for all layers.

    A pass of prefill fills nodes, or suffixes with tokens of prompts. A step appends tokens to each row's suffix. What
    a captured pass reads and writes is known before it: a step's tables, which know lengths on the device and by which
    kernels append; a prefill's padded buffers.

    Attributes:
        items, spans: Runs of tokens packed into a pass of prefill, () in a step; their spans, adjacent ones joined.
        runs: What each of these tokens sees; None in a step.
        contexts: Where nodes are divided between processes, the spans that the pass reads, on any of them.
        own_tokens: Tokens of the items that this process stores; None for all.
        divided: What this process computes of the pass; None for all of it.
        positions: In prefill by rows, the positions of the pass's tokens, counted row by row: ``[tokens]`` int64; None
            when tokens are packed into one row, or are one row without padding.
        tensors: In prefill by transformers' own attention and masks, the pass's rows and their width: layers return
            the keys and values that they are given. Otherwise None.
        before, queries: In a step, the lengths of suffixes before it, and the tokens that it appends to each.
        forest, stored: The cache's forest in a step, and the part that a step reads as this process stores it, see
            `SharedState.step_forest`.
        capacity: Tokens that suffixes must have room for.
        tables: Kernel tables of a captured step, by layer; None where layers make them.
        origins: For a captured step of rows that may be reordered, ``[rows, capacity]`` int32: see `SuffixOrigins`.
        expanded: By layer, the expanded nodes of a captured step; None where layers find them.
        padded: Buffers and attention of a captured prefill; None in other passes.
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
    division: Undivided = UNDIVIDED
    torch_backend: TorchBackend = "auto"
    tables: TablesByShape | None = None
    origins: Tensor | None = None
    expanded: Mapping[int, ExpandedKV] | None = None
    padded: Padded | None = None

    @property
    def segments(self) -> Sequence[PrefillItem]:
        """The items, where several are packed into one row, in which layers with states run one after another."""
        return self.items if len(self.items) > 1 and self.positions is None else ()

    def starts(self, device: torch.device) -> Tensor:
        """Where segments begin in the row, and its number of tokens: ``[segments + 1]`` int32."""
        if device not in self._starts:
            ends = accumulate((item.span.length for item in self.segments), initial=0)
            self._starts[device] = torch.tensor(list(ends), dtype=torch.int32, device="cpu").to(device)
        return self._starts[device]

    @cached_property
    def _starts(self) -> dict[torch.device, Tensor]:
        return {}

    @cached_property
    def lengths(self) -> int | list[int]:
        """Tokens of suffixes that this process stores after a step, see `ForestKV`; waits for a device's lengths."""
        assert self.before is not None
        return self.division.stored_suffixes(self.before.plus(self.queries)).on_host()

    @cached_property
    def seen(self) -> Tensor | None:
        """Tokens of suffixes stored here that a step's queries see, where processes divide them, see `ForestKV`."""
        assert self.before is not None
        return self.division.seen(self.before, self.queries)


def _positions_in(rows: Tensor, tokens: int) -> Tensor | None:
    """Positions of so many tokens in rows ``[rows, width]``, counted row by row; None in one row without padding."""
    if tokens < rows.numel():
        return rows.flatten().nonzero().flatten()
    return None if len(rows) == 1 else torch.arange(tokens, device=rows.device)


@dataclass
class SharedState:
    """State shared by all layers of one cache.

    Attributes:
        forest: Nodes over the rows; None while the number of rows is unknown.
        padded_length: Tokens in the longest row, including the padding of the caller's ``input_ids``.
        max_suffix: Upper bound on suffix tokens, if known; bounds allocation.
        tables: Kernel inputs other than keys and values, by device and heads of a layer, each with whether it was made
            while own nodes held most keys.
        current: The pass in progress; one without items between passes.
        suffix_rows: While prompts are prefilled into suffixes, the row of each segment number that stands for one.
        segment_lengths: Tokens of each storage segment.
        segment_runs: By number of a segment that is made of suffixes, the tokens of each of these.
        met: The model whose layers the cache has; not kept alive, and unknown to copies.
        position_planes: Planes of positions that the model takes, all equal; 0 for positions without planes.
        counts_tokens: Whether positions after the rows are those of counted tokens, as they are not after images
            whose tokens have positions in planes.
        padded_width: Where positions count the padding of prompts, the width of their batch; None where they count
            each row's tokens.
        longest_to_come: Where rows take the places of others, tokens in the longest of all of them by the end of the
            call; else 0.
        expanded: Keys and values of nodes that store latents, as the steps of a call read them; None for latents.
        division: How processes divide nodes and suffixes. `forest` and `suffixes` are the whole ones on each of them.
    """

    forest: Forest | None = None
    suffixes: Suffixes = field(default_factory=Suffixes)
    padded_length: int = 0
    max_suffix: int | None = None
    backend: Backend = "auto"
    tables: dict[tuple[torch.device, HeadShape], tuple[StepTables, bool]] = field(default_factory=dict)
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
    division: Undivided = UNDIVIDED

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
        spans, division = joined(item.span for item in items), self.division
        runs = [Run(item.span.length, division.read_at_once(item.context)) for item in items]
        divided = division.part_of(runs) if divide else None
        return Pass(
            items,
            spans,
            PackedRuns(runs) if divided is None else divided.runs,
            tuple(dict.fromkeys(span for run in runs for span in run.context if isinstance(span, Span))),
            division.own_tokens(spans),
            divided,
            None if rows is None else _positions_in(rows, sum(span.length for span in spans)),
            (rows.shape[0], rows.shape[1]) if tensors and rows is not None else None,
            torch_backend=self.torch_backend,
        )

    def step(self, queries: int) -> Pass:
        """Make the pass that appends so many tokens to every suffix, for all of its layers."""
        before = self.suffixes.lengths
        self.current = Pass(
            before=before,
            queries=queries,
            forest=self.forest,
            stored=self.step_forest,
            capacity=self.division.room(before.longest + queries),
            division=self.division,
            torch_backend=self.torch_backend,
        )
        return self.current

    def expand(self, layers: Sequence[Any], free_memory: Callable[[torch.device], int]) -> None:
        """Make the keys and values of nodes with latents for which that pays, as the steps of a call read them.

        `layers` are all that store keys and values of every token; `free_memory` gives the free bytes on a device.
        """
        latents = {layer.index: layer.storage for layer in layers if isinstance(layer.storage, LatentStorage)}
        alike = len(latents) == len(layers) and all(layer.store.window is None for layer in layers)
        if self.forest is None or not latents or not alike or self.division.is_divided:
            return
        steps = MOST_STEPS_EXPECTED if self.max_suffix is None else self.max_suffix - self.suffixes.longest
        tokens = self.forest.rows * min(MOST_STEPS_EXPECTED, self.max_suffix or MOST_STEPS_EXPECTED)
        suffixes = tokens * sum(storage.suffix_bytes_per_token for storage in latents.values())
        devices = {layer.device for layer in layers}

        def free() -> float:
            if any(device.type != "cuda" for device in devices):
                return float("inf")  # the free memory of a CPU is not known
            return min(map(free_memory, devices)) - suffixes

        self.expanded = expanded_where_it_pays(latents, self.forest, steps, free)

    def tables_for(
        self, device: torch.device, shape: HeadShape, forest: Forest, make: Callable[[], StepTables], *, dominate: bool
    ) -> StepTables:
        """Tables of layers of this shape, made anew when they no longer suit the batch."""
        tables, made_so = self.tables.get((device, shape), (None, None))
        if tables is None or made_so != dominate or tables.rows != forest.rows or not tables.fits(forest):
            self.tables[device, shape] = tables, _ = make(), dominate
        return tables

    def stored_length(self, segment: int) -> int:
        """Tokens of a segment that this process stores."""
        return self.division.shard_of(self.segment_runs, segment).count(self.segment_lengths[segment])

    @property
    def stored_forest(self) -> Forest | None:
        """The part of `forest` that this process stores; the same object for the same forest."""
        return None if self.forest is None else self.division.stored(self.forest, self.segment_runs)

    @property
    def step_forest(self) -> Forest | None:
        """Nodes of `stored_forest` that steps read as they are stored; all but those expanded."""
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
