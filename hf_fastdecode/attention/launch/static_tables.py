"""Kernel tables at fixed addresses, for decode steps in a captured CUDA graph.

A captured graph replays with the same pointers. These tables are rewritten in place between replays, so that other
prompts, lengths, storage and rows need no new capture as long as they fit the tables' sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.failures import KernelFailedError
from ...kernels.forest_decode.limits import refusal
from ...kernels.forest_decode.schedule import Capacity, Schedule
from ..forest import Forest
from ..kv import Segment
from ..scoring import Scoring
from .kernel_tables import node_addresses, run_kernels, suffix_addresses
from .own_nodes import own_tokens, with_own_nodes, with_own_segments
from .plan import Layout, Plan

_TOKENS_BETWEEN_LOOKS = 32
"""Suffix tokens between two updates of the schedules."""


@dataclass(frozen=True)
class LayerStorage:
    """Storage of one layer's keys and values.

    Attributes:
        segments: Storage of the nodes.
        suffix: ``[rows, kv_heads, capacity, head_dim]`` each.
    """

    segments: Sequence[Segment] | Mapping[int, Segment]
    suffix: Segment


class KernelRefusalError(Exception):
    """The kernels do not support a layer's attention; the message gives the reason."""


@dataclass
class _Scheduled:
    """Schedule tables of one layout in the captured graph, and the plan whose schedule they hold."""

    plan: Plan
    programs: int
    room: Capacity
    tables: Schedule

    def takes(self, plan: Plan) -> bool:
        """Whether the tables fit the schedules of another plan."""
        return plan.config == self.plan.config and self.room.holds(plan.needed)

    def turn_to(self, plan: Plan, suffix_length: int) -> None:
        """Load the schedule of a plan for this suffix length, unless it is loaded."""
        programs = plan.programs(suffix_length)
        if plan is not self.plan or programs != self.programs:
            self.tables.copy_(plan.schedule(programs, self.room))
            self.plan, self.programs = plan, programs


class StaticTables:
    """Kernel tables for `rows` rows over forests of bounded size.

    Args:
        rows: Rows of the step; a batch may have fewer.
        layers: Attention layers of the model.
        forest: The forest that decides the sizes, which are rounded up.
        device: Device of the step.
        own_nodes: Attend to all but the last tokens of long suffixes as nodes, see `own_nodes`.
    """

    def __init__(self, rows: int, layers: int, forest: Forest, device: torch.device, *, own_nodes: bool = False):
        self.rows, self.device, self.forest = rows, device, forest
        self._own_nodes = own_nodes
        largest = self._largest(forest)
        self._depths = _rounded(len(largest.levels))
        self._nodes = _rounded(len(forest.nodes) + (rows if own_nodes else 0))
        self.nodes = torch.zeros(layers, 3, self._nodes, dtype=torch.int64, device=device)
        self.suffixes = torch.zeros(layers, 4, dtype=torch.int64, device=device)
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        # Filled by the layers' first forward pass.
        self._schedules: dict[Layout, _Scheduled] = {}
        self._batch = forest
        self._storage: Sequence[LayerStorage] = ()
        self._suffix_length = self._own_tokens = 0

    def fits(self, forest: Forest) -> bool:
        """Whether a batch over this forest fits the captured tables."""
        largest = self._largest(forest)
        if forest.rows > self.rows or len(largest.levels) > self._depths or len(largest.nodes) > self._nodes:
            return False
        return all(known.takes(self._plan(largest, layout, known)) for layout, known in self._schedules.items())

    def load(self, forest: Forest, storage: Sequence[LayerStorage], suffix_length: int) -> None:
        """Write the tables for a batch, for which `fits` holds.

        Args:
            forest: The batch's nodes.
            storage: Keys and values, layer by layer.
            suffix_length: Tokens in every row's suffix.
        """
        self._batch, self._storage, self._suffix_length = forest, storage, suffix_length
        rows = torch.arange(self.rows, dtype=torch.int64, device="cpu")
        self.slots.copy_(torch.where(rows < forest.rows, rows, -1))
        self._load_nodes(self._wanted_own_tokens())
        self._load_suffixes()

    def grow(self) -> None:
        """Count the token that a step has appended to every suffix, and update the tables where needed."""
        self.lengths.add_(1)
        self._suffix_length += 1
        if (own := self._wanted_own_tokens()) != self._own_tokens:
            self._load_nodes(own)
            self._load_suffixes()
        elif self._suffix_length % _TOKENS_BETWEEN_LOOKS == 0:
            for known in self._schedules.values():
                known.turn_to(known.plan, self._suffix_length - own)

    def load_suffixes(self, storage: Sequence[LayerStorage]) -> None:
        """Write the tables for suffixes that have moved."""
        self._storage = storage
        self._load_nodes(self._own_tokens)
        self._load_suffixes()

    def _wanted_own_tokens(self) -> int:
        """Leading tokens of every suffix that should be own nodes; 0 before the layers' first forward pass."""
        windowed = any(layout.windowed for layout in self._schedules)
        return own_tokens(self._suffix_length) if self._own_nodes and self._schedules and not windowed else 0

    def _load_nodes(self, own: int) -> None:
        """Write addresses and schedules of the batch's nodes, with own nodes of `own` tokens."""
        self.forest, self._own_tokens = with_own_nodes(self._batch, own), own
        nodes = torch.zeros(self.nodes.shape, dtype=torch.int64, device="cpu")
        for index, layer in enumerate(self._storage):
            segments = with_own_segments(layer.segments, layer.suffix) if own else layer.segments
            addresses = node_addresses(self.forest, segments)
            nodes[index, :, : len(self.forest.nodes)] = torch.tensor(addresses, dtype=torch.int64, device="cpu")
        self.nodes.copy_(nodes)
        for layout, known in self._schedules.items():
            known.turn_to(self._plan(self.forest, layout, known), self._suffix_length - own)

    def _load_suffixes(self) -> None:
        """Write addresses and lengths of the suffixes after their own nodes."""
        own = self._own_tokens
        addresses = [suffix_addresses(layer.suffix, own) for layer in self._storage]
        self.suffixes.copy_(torch.tensor(addresses, dtype=torch.int64, device="cpu"))
        self.lengths.fill_(self._suffix_length - own)

    def _largest(self, forest: Forest) -> Forest:
        """The forest with every node that it may get, own nodes among them."""
        return with_own_nodes(forest, int(self._own_nodes))

    def attend(
        self,
        layer: int,
        query: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Append new keys and values to the suffixes, and attend.

        Args:
            layer: Index of the layer.
            query: ``[rows, heads, queries, head_dim]``.
            new_keys: ``[rows, kv_heads, queries, head_dim]``.
            new_values: The same shape.
            scoring: The layer's score options.

        Returns:
            ``[rows, heads, queries, head_dim]`` in the query's dtype.

        Raises:
            KernelRefusalError: The kernels do not support these.
        """
        layout = Layout.of(query, new_keys, scoring)
        while True:
            if layout not in self._schedules:
                if reason := refusal(query, new_keys, new_values, []):
                    raise KernelRefusalError(reason)
                plan = self._plan(self.forest, layout)
                own = (
                    self.rows * layout.kv_heads * -(-layout.queries_per_kv_head // plan.config.block_m)
                    if self._own_nodes
                    else 0
                )
                room = Capacity(self._depths, self._nodes, _rounded(plan.needed.units + own))
                programs = plan.programs(self._suffix_length - self._own_tokens)
                self._schedules[layout] = _Scheduled(plan, programs, room, plan.schedule(programs, room))
            known = self._schedules[layout]
            tables = (self.nodes[layer], self.suffixes[layer], self.slots, self.lengths, known.tables)
            try:
                return run_kernels(query, new_keys, new_values, *tables, known.plan.config, scoring)
            except KernelFailedError:  # the next plan chooses among the other kernels
                del self._schedules[layout]

    def _plan(self, forest: Forest, layout: Layout, known: _Scheduled | None = None) -> Plan:
        like = known.plan.config if known is not None else None
        return Plan(forest, layout, self.device, rows=self.rows, like=like)


def _rounded(count: int) -> int:
    """The next power of two, at least 1, so that a slightly larger forest still fits."""
    return 1 << max(0, count - 1).bit_length()
