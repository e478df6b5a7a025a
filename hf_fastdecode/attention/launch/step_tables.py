"""Tables of a decode step on the device: addresses, lengths and schedules, which the kernels of like layers read.

Eager and captured steps use the same tables. They are rewritten in place, so that a captured CUDA graph, which replays
with the same pointers, serves other prompts, lengths, storage and rows as long as these fit the tables' sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from ...errors import Unsupported
from ...kernels.failures import KernelFailedError
from ...kernels.forest_decode.config import Config
from ...kernels.forest_decode.limits import refusal
from ...kernels.forest_decode.schedule import Capacity, Schedule
from ..forest import Forest
from ..kv import Partial, Scoring, Segment, SuffixLengths
from .kernel_call import AddressesOfLayers, in_rows, suffix_addresses
from .plan import NO_OWN_NODES, HeadShape, LaunchPlan, OwnNodes, may_stay, own_tokens, with_own_nodes


class DescribedStep(NamedTuple):
    """Step that the tables describe."""

    forest: Forest
    own_tokens: int  # leading suffix tokens in own nodes
    suffixes: SuffixLengths  # lengths of whole suffixes
    stored: SuffixLengths  # lengths of the parts stored here


class NewTokens(NamedTuple):
    """Where a step of one token per row finds it, of suffixes that other code attends to: ``[rows]`` each."""

    positions: Tensor  # int64: tokens in each row's suffix before the step
    slots: Tensor  # int64: where the token is written
    lengths: Tensor  # int32: tokens stored with it


Result = TypeVar("Result")

Attend = Callable[[Scoring, Partial | None], Tensor]
"""Attends to stored keys, and writes the partial if memory for it is given."""

_SCHEDULE_INTERVAL = 32
"""Suffix tokens between two updates of the schedules."""


class StoredKV(Protocol):
    """Storage of one layer's keys and values.

    Attributes:
        segments: Storage of the nodes, by number.
        suffix: ``[rows, kv_heads, capacity, head_dim]`` each; None for a layer that attends to its suffixes by itself.
        version: Another object whenever `segments` or `suffix` are reallocated.
    """

    @property
    def segments(self) -> Mapping[int, Segment]: ...
    @property
    def suffix(self) -> Segment | None: ...
    @property
    def version(self) -> object: ...


@dataclass
class _Scheduled:
    """Schedule tables of one head shape, and the plan whose schedule they hold."""

    plan: LaunchPlan
    programs: int
    capacity: Capacity
    tables: Schedule

    def load(self, plan: LaunchPlan, suffix_length: int) -> None:
        """Load the schedule of a plan with the same launch parameters, unless it is loaded."""
        programs = plan.programs(suffix_length)
        if plan is not self.plan or programs != self.programs:
            self.plan, self.programs = plan, 0  # until the copy is done
            self.tables.copy_(plan.schedule(programs, self.capacity))
            self.programs = programs


class StepTables:
    """Kernel tables for `rows` rows over forests of bounded size.

    Args:
        rows: Rows of the step; a batch may have fewer.
        layers: Indices of the layers that read the tables, or those known so far; the tables grow for more.
        forest: The forest that decides the sizes, which are rounded up; launch parameters are chosen for that of the
            first step.
        own_nodes: How to attend to long suffixes.

    Attributes:
        rest: Elements of keys that all KV heads share, see `RestTables`.
    """

    rest: int = 0
    _lines: ClassVar[int] = 3  # of `nodes` in each layer, see `AddressesOfLayers`

    def __init__(
        self,
        rows: int,
        layers: Iterable[int],
        forest: Forest,
        device: torch.device,
        own_nodes: OwnNodes = NO_OWN_NODES,
    ):
        self.rows, self.device, self.forest, self.own_nodes = rows, device, forest, own_nodes
        self._sized_for = forest
        self._positions = {layer: position for position, layer in enumerate(layers)}
        largest = self._largest(forest)
        self._depths = _rounded(len(largest.levels))
        self._nodes = _rounded(len(forest.nodes) + (rows if own_nodes.used else 0))
        with torch.inference_mode(False):  # inference tensors could not be written outside inference mode
            self.nodes = torch.zeros(len(self._positions), self._lines, self._nodes, dtype=torch.int64, device=device)
            self.suffixes = torch.zeros(len(self._positions), 4, dtype=torch.int64, device=device)
            self.slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
            self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        # Filled by the layers' first forward pass.
        self._schedules: dict[HeadShape, _Scheduled] = {}
        self._described: DescribedStep | None = None  # None also after a failed update
        self._versions: dict[int, object] = {}  # of the storage whose addresses are written, by layer

    def fits(self, forest: Forest) -> bool:
        if self._described is not None and forest is self._described.forest:
            return True
        largest = self._largest(forest)
        if forest.rows > self.rows or len(largest.levels) > self._depths or len(largest.nodes) > self._nodes:
            return False
        return all(self._holds(largest, shape, known) for shape, known in self._schedules.items())

    def follow(
        self, forest: Forest, suffixes: SuffixLengths, layers: Mapping[int, StoredKV], *, in_order: bool = True
    ) -> None:
        """Describe a batch's next step: writes what has changed since the last one.

        Args:
            forest: The batch's nodes, for which `fits` holds.
            suffixes: Tokens in each row's suffix before the step, of whole suffixes where these are divided.
            layers: Storage of layers, by index; that of others is assumed not to have moved.
            in_order: Whether each row's suffix is stored in its own slot throughout, as own nodes need.
        """
        stored = self._stored(suffixes)
        now = DescribedStep(forest, self._wanted_own_tokens(stored) if in_order else 0, suffixes, stored)
        before, self._described = self._described, None
        if before is None or before.forest is not forest:
            rows = torch.arange(self.rows, dtype=torch.int32, device="cpu")
            self.slots.copy_(torch.where(rows < forest.rows, rows, -1))
        if before is None or (before.forest, before.own_tokens) != (forest, now.own_tokens):
            before = None
            self.forest = with_own_nodes(forest, now.own_tokens)
            self._versions.clear()
        if before is None or before.suffixes != suffixes:
            self._write_lengths(now)
            self._update_schedules(before, now)
        self._write_addresses(layers, now.own_tokens)
        self._described = now

    def _stored(self, suffixes: SuffixLengths) -> SuffixLengths:
        """Tokens stored here of suffixes of these lengths."""
        return suffixes

    def new_tokens(self) -> NewTokens:
        """Where a step of one token per row finds it, computed on the device; without own nodes."""
        positions = self.lengths.long()
        return NewTokens(positions, positions, self.lengths + 1)

    def attend(
        self,
        layer: int,
        query: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
        scoring: Scoring,
        origins: Tensor | None = None,
        into: Partial | None = None,
    ) -> Tensor:
        """Append new keys and values to the suffixes, and attend.

        Args:
            query: ``[rows, heads, queries, head_dim]``.
            new_keys: ``[rows, kv_heads, queries, head_dim]``.
            new_values: The same shape.
            origins: As for `forest_decode`.
            into: When given, where to write the partial, fp32 and contiguous.

        Returns:
            ``[rows, heads, queries, head_dim]`` in the query's dtype; fp32 with `into`.

        Raises:
            Unsupported: The kernels do not support these, or cannot be compiled or launched here.
        """
        position = self._positions[layer]

        def attend(scoring: Scoring, into: Partial | None) -> Tensor:
            options: dict[str, Any] = {"scale": scoring.scale, "soft_cap": scoring.softcap, "window": scoring.window}
            options |= {"sinks": scoring.sinks, "biases": scoring.distances, "origins": origins, "into": into}

            def run(known: _Scheduled) -> Tensor:
                from ...kernels.forest_decode.api import forest_decode

                queries, keys, values = in_rows(query, new_keys, new_values)
                of_layer = self.nodes[position], self.suffixes[position], self.slots, self._kernel_lengths
                out, _ = forest_decode(queries, keys, values, *of_layer, known.tables, known.plan.config, **options)
                return out

            return self._run(run, query, new_keys, new_values, scoring)

        return self._over_all_keys(attend, query, scoring, into)

    def _over_all_keys(self, attend: Attend, query: Tensor, scoring: Scoring, into: Partial | None) -> Tensor:
        """The result of `attend`, which attends to the keys stored here; merged with others where keys are divided."""
        return attend(scoring, into)

    def attend_nodes(
        self,
        layer: int,
        query: Tensor,
        scale: float,
        *,
        kv_heads: int | None = None,
        soft_cap: float | None = None,
        other: Partial | None = None,
    ) -> Partial:
        """Attend to the nodes alone, where other code attends to the remaining keys of the rows; without own nodes.

        Args:
            query: ``[rows, heads, queries, head_dim + rest]`` in the dtype of the nodes.
            kv_heads: KV heads of the nodes; as many as the query has when None.
            soft_cap: As for `forest_partial`.
            other: When given, the partial of further keys, see `forest_partial`.

        Returns:
            The partial, in fp32 or the dtype of `other`; that of no keys for rows without any.

        Raises:
            Unsupported: As `attend`.
        """

        def run(known: _Scheduled) -> Partial:
            from ...kernels.forest_decode.api import forest_partial

            tables = (self.nodes[self._positions[layer]], self.slots, known.tables, known.plan.config)
            options: dict[str, Any] = {"kv_heads": keys.shape[1], "scale": scale, "soft_cap": soft_cap}
            return Partial(*forest_partial(query, *tables, **options, rest=self.rest, other=other))

        if query.stride(-1) != 1:
            query = query.contiguous()
        keys = query[:, :kv_heads, :, : query.shape[-1] - self.rest]  # of the shape that new keys would have
        return self._run(run, query, keys, keys, Scoring(scale, soft_cap, None, None))

    def _run(
        self, run: Callable[[_Scheduled], Result], query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring
    ) -> Result:
        """Run kernels with the schedule of the layer's shape, made if there is none."""
        shape = HeadShape.of(query, keys, scoring, rest=self.rest)
        while True:
            if shape not in self._schedules:
                if reason := refusal(query, keys, values, []):
                    raise Unsupported(reason)
                self._schedules[shape] = self._scheduled(shape)
            try:
                return run(self._schedules[shape])
            except KernelFailedError:  # the next plan chooses among the other kernels
                del self._schedules[shape]

    def _scheduled(self, shape: HeadShape) -> _Scheduled:
        plan = self._plan(self.forest, shape)
        sized = self._plan(self._sized_for, shape, plan.config).needed  # it may be a larger forest
        own = self.rows * shape.kv_heads * -(-shape.queries_per_kv_head // plan.config.block_m)
        units = max(plan.needed.units, sized.units) + (own if self.own_nodes.used else 0)
        depths = max(plan.needed.depths, sized.depths)  # fewer than levels where nodes are read in chains
        depths += self.own_nodes.used
        capacity = Capacity(min(self._depths, _rounded(depths)), self._nodes, _rounded(units))
        assert self._described is not None
        programs = plan.programs(self._described.stored.longest - self._described.own_tokens)
        with torch.inference_mode(False):
            return _Scheduled(plan, programs, capacity, plan.schedule(programs, capacity))

    def _wanted_own_tokens(self, suffixes: SuffixLengths) -> int:
        """Leading tokens of every suffix that should be own nodes; 0 before the layers' first forward pass."""
        windowed = any(shape.windowed for shape in self._schedules)
        wanted = self.own_nodes.used and bool(self._schedules) and not windowed
        return own_tokens(suffixes.shortest) if wanted else 0

    @property
    def _kernel_lengths(self) -> Tensor:
        """The lengths as `forest_decode` reads them."""
        return self.lengths

    def _write_lengths(self, now: DescribedStep) -> None:
        """Write the tokens of suffixes that are not in own nodes."""
        if now.suffixes.per_row is None:
            self.lengths.fill_(now.suffixes.longest - now.own_tokens)
        else:
            own = now.suffixes.per_row - now.own_tokens
            self.lengths[: len(own)].copy_(own, non_blocking=True)  # the host need not wait: the copy is staged

    def _update_schedules(self, before: DescribedStep | None, now: DescribedStep) -> None:
        """Update the schedules for other nodes (no `before`), or every few tokens for longer suffixes."""
        length = now.stored.longest
        if before is not None and before.stored.longest // _SCHEDULE_INTERVAL == length // _SCHEDULE_INTERVAL:
            return
        for shape, known in self._schedules.items():
            # The tables, and the graph that reads them, are made for these launch parameters.
            plan = self._plan(self.forest, shape, known.plan.config) if before is None else known.plan
            known.load(plan, length - now.own_tokens)

    def _write_addresses(self, layers: Mapping[int, StoredKV], own: int) -> None:
        """Write the addresses of layers whose storage has moved, and of those between them, by one copy."""
        moved = [index for index, stored in layers.items() if self._versions.get(index) is not stored.version]
        if not moved:
            return
        self._grow(moved)
        first, last = (extreme(self._positions[index] for index in moved) for extreme in (min, max))
        by_position = {self._positions[index]: stored for index, stored in layers.items() if index in self._positions}
        nodes = torch.zeros(last + 1 - first, self._lines, self._nodes, dtype=torch.int64, device="cpu")
        addresses, of_suffixes = AddressesOfLayers(self.forest), []
        for line in range(last + 1 - first):
            stored = by_position[first + line]
            suffix = stored.suffix
            nodes[line, :, : len(self.forest.nodes)] = self._node_addresses(addresses, stored)
            of_suffixes.append([0] * 4 if suffix is None else suffix_addresses(suffix, own))
        suffixes = torch.tensor(of_suffixes, dtype=torch.int64, device="cpu")
        self.nodes[first : last + 1].copy_(nodes)
        self.suffixes[first : last + 1].copy_(suffixes)
        self._versions |= {index: layers[index].version for index in layers if first <= self._positions[index] <= last}

    def _node_addresses(self, addresses: AddressesOfLayers, stored: StoredKV) -> Tensor:
        """Addresses of the nodes in one layer: ``[lines, nodes]`` int64, on the CPU."""
        return addresses.of(stored.segments, stored.suffix)

    def _grow(self, layers: Iterable[int]) -> None:
        """Grow the tables for the addresses of new layers; never in captured steps, which know theirs."""
        for layer in layers:
            self._positions.setdefault(layer, len(self._positions))
        if len(self._positions) > len(self.nodes):
            with torch.inference_mode(False):
                more = 2 * len(self._positions) - len(self.nodes)
                self.nodes = torch.cat([self.nodes, self.nodes.new_zeros(more, *self.nodes.shape[1:])])
                self.suffixes = torch.cat([self.suffixes, self.suffixes.new_zeros(more, 4)])

    def _largest(self, forest: Forest) -> Forest:
        """The forest with every node that it may get, own nodes among them."""
        return with_own_nodes(forest, int(self.own_nodes.used))

    def _holds(self, forest: Forest, shape: HeadShape, known: _Scheduled) -> bool:
        """Whether the schedules of a forest fit these tables, whose launch parameters serve it."""
        plan, kept = self._plan(forest, shape), known.plan.config
        if not may_stay(forest, shape, self.device, plan.config, kept):
            return False
        return known.capacity.holds(self._plan(forest, shape, kept).needed)

    def _plan(self, forest: Forest, shape: HeadShape, config: Config | None = None) -> LaunchPlan:
        own_dominate = self.own_nodes.dominate
        return LaunchPlan(forest, shape, self.device, rows=self.rows, own_dominate=own_dominate, config=config)


def _rounded(count: int) -> int:
    """The next power of two, at least 1, so that a slightly larger forest still fits."""
    return 1 << max(0, count - 1).bit_length()


class Alike(NamedTuple):
    """Common properties of layers that read the same tables: their heads, and how they attend to long suffixes."""

    shape: HeadShape
    own_nodes: OwnNodes


class TablesByShape:
    """Tables of a step for every layer, see `StepTables`; `layers` has each layer's `Alike`.

    Args:
        make: Makes the tables of layers that are alike; arguments as for `StepTables`.
    """

    def __init__(
        self,
        rows: int,
        layers: Mapping[int, Alike],
        forest: Forest,
        device: torch.device,
        make: Callable[..., StepTables] = StepTables,
    ):
        self.layers = layers
        self._tables = {
            alike: make(
                rows, [one for one, other in layers.items() if other == alike], forest, device, alike.own_nodes
            )
            for alike in dict.fromkeys(layers.values())
        }

    def of(self, layer: int) -> StepTables:
        return self._tables[self.layers[layer]]

    @property
    def own_nodes_dominate(self) -> bool:
        """Whether launch parameters of any layers suit own nodes."""
        return any(alike.own_nodes.dominate for alike in self._tables)

    def fits(self, forest: Forest) -> bool:
        return all(tables.fits(forest) for tables in self._tables.values())

    def follow(self, forest: Forest, suffixes: SuffixLengths, stored: Mapping[int, StoredKV]) -> None:
        for alike, tables in self._tables.items():
            own = {index: one for index, one in stored.items() if self.layers[index] == alike}
            tables.follow(forest, suffixes, own)


class RestTables(StepTables):
    """Tables for nodes alone; further arguments as for `StepTables`.

    Storage of layers has `rests` too: by segment, the elements of keys that all KV heads share, ``[1, tokens, rest]``.

    Args:
        rest: Elements of a key that all KV heads share; the last ones.
    """

    _lines: ClassVar[int] = 4

    def __init__(self, rest: int, *args: Any):
        self.rest = rest
        super().__init__(*args)

    def _node_addresses(self, addresses: AddressesOfLayers, stored: Any) -> Tensor:
        rests = (stored.rests[node.span.segment][0, node.span.start :] for node in self.forest.nodes)
        of_rests = torch.tensor([rest.data_ptr() for rest in rests], dtype=torch.int64, device="cpu")
        return torch.cat([super()._node_addresses(addresses, stored), of_rests[None]])
