"""What the decode kernels read beside keys and values, at fixed addresses: the state behind a captured decode step.

A captured CUDA graph replays with the same pointers. The tables here stay where they are, and are rewritten between
replays: other prompts, lengths, storage and rows need no new capture, as long as they fit the tables' sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.failures import KernelFailedError
from ..kernels.forest_decode.limits import refusal
from ..kernels.forest_decode.schedule import Capacity, Schedule
from .forest import Forest
from .kv import Segment
from .plan import Layout, Plan
from .scoring import Scoring
from .triton_ops import node_addresses, run_kernels, suffix_addresses

_TOKENS_BETWEEN_LOOKS = 32
"""By so many suffixes grow until the schedules are looked at again."""


@dataclass(frozen=True)
class LayerStorage:
    """Where one layer's keys and values lie.

    Attributes:
        segments: Storage of the nodes.
        suffix: ``[rows, kv_heads, capacity, head_dim]`` each.
    """

    segments: Sequence[Segment] | Mapping[int, Segment]
    suffix: Segment


class KernelRefusalError(Exception):
    """The kernels cannot compute what a layer asks for; the message says why."""


@dataclass
class _Scheduled:
    """What one layout's layers are captured with: tables of a size, which hold a plan's schedule."""

    plan: Plan
    programs: int
    room: Capacity
    tables: Schedule

    def takes(self, plan: Plan) -> bool:
        """Whether the tables can hold the schedules of another plan."""
        return plan.config == self.plan.config and self.room.holds(plan.needed)

    def turn_to(self, plan: Plan, suffix_length: int) -> None:
        """Hold another plan's schedule, or the same plan's for longer suffixes."""
        programs = plan.programs(suffix_length)
        if plan is not self.plan or programs != self.programs:
            self.tables.copy_(plan.schedule(programs, self.room))
            self.plan, self.programs = plan, programs


class StaticTables:
    """Tables for `rows` rows over forests of a bounded size.

    Args:
        rows: Rows of the step; a batch may have fewer.
        layers: Attention layers of the model.
        forest: The forest that the sizes are made for, rounded up.
        device: Where the step runs.
    """

    def __init__(self, rows: int, layers: int, forest: Forest, device: torch.device):
        self.rows, self.device, self.forest = rows, device, forest
        self._depths, self._nodes = _rounded(len(forest.levels)), _rounded(len(forest.nodes))
        self.nodes = torch.zeros(layers, 3, self._nodes, dtype=torch.int64, device=device)
        self.suffixes = torch.zeros(layers, 4, dtype=torch.int64, device=device)
        self.slots = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int32, device=device)
        # Filled by the layers' first pass.
        self._schedules: dict[Layout, _Scheduled] = {}
        self._suffix_length = 0

    def fits(self, forest: Forest) -> bool:
        """Whether a batch over this forest can use these tables as they were captured."""
        if forest.rows > self.rows or len(forest.levels) > self._depths or len(forest.nodes) > self._nodes:
            return False
        return all(known.takes(self._plan(forest, layout, known)) for layout, known in self._schedules.items())

    def load(self, forest: Forest, storage: Sequence[LayerStorage], suffix_length: int) -> None:
        """Point the tables at a batch, for which `fits` holds.

        Args:
            forest: The batch's nodes.
            storage: Keys and values, layer by layer.
            suffix_length: Tokens in every row's suffix.
        """
        self.forest = forest
        host: dict[str, Any] = {"dtype": torch.int64, "device": "cpu"}
        nodes = torch.zeros(self.nodes.shape, **host)
        for index, layer in enumerate(storage):
            nodes[index, :, : len(forest.nodes)] = torch.tensor(node_addresses(forest, layer.segments), **host)
        self.nodes.copy_(nodes)
        self.load_suffixes(storage)
        rows = torch.arange(self.rows, **host)
        self.slots.copy_(torch.where(rows < forest.rows, rows, -1))
        self.lengths.fill_(suffix_length)
        self._suffix_length = suffix_length
        for layout, known in self._schedules.items():
            known.turn_to(self._plan(forest, layout, known), suffix_length)

    def grow(self) -> None:
        """Every row's suffix is longer by the token that a step has appended."""
        self.lengths.add_(1)
        self._suffix_length += 1
        if self._suffix_length % _TOKENS_BETWEEN_LOOKS == 0:
            for known in self._schedules.values():
                known.turn_to(known.plan, self._suffix_length)

    def load_suffixes(self, storage: Sequence[LayerStorage]) -> None:
        """Point the tables at suffixes that have moved."""
        self.suffixes.copy_(torch.tensor([suffix_addresses(layer.suffix) for layer in storage], device="cpu"))

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
            scoring: What the layer does to its scores.

        Returns:
            ``[rows, heads, queries, head_dim]`` in the query's dtype.

        Raises:
            KernelRefusalError: The kernels do not take these.
        """
        layout = Layout.of(query, new_keys, scoring)
        while True:
            if layout not in self._schedules:
                if reason := refusal(query, new_keys, new_values, []):
                    raise KernelRefusalError(reason)
                plan = self._plan(self.forest, layout)
                room = Capacity(self._depths, self._nodes, _rounded(plan.needed.units))
                programs = plan.programs(self._suffix_length)
                self._schedules[layout] = _Scheduled(plan, programs, room, plan.schedule(programs, room))
            known = self._schedules[layout]
            tables = (self.nodes[layer], self.suffixes[layer], self.slots, self.lengths, known.tables)
            try:
                return run_kernels(query, new_keys, new_values, *tables, known.plan.config, scoring)
            except KernelFailedError:  # which leaves one kernel less for the next plan
                del self._schedules[layout]

    def _plan(self, forest: Forest, layout: Layout, known: _Scheduled | None = None) -> Plan:
        like = known.plan.config if known is not None else None
        return Plan(forest, layout, self.device, rows=self.rows, like=like)


def _rounded(count: int) -> int:
    """The next power of two, so that a slightly larger forest still fits; at least 1."""
    return 1 << max(0, count - 1).bit_length()
