"""Tables of the decode kernels (addresses, lengths, schedules), shared between layers and steps, and their launch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...kernels.failures import KernelFailedError
from ...kernels.forest_decode.limits import refusal
from ...kernels.forest_decode.schedule import Schedule
from ..forest import Forest
from ..kv import Segment
from ..scoring import Scoring
from .dispatch import KERNELS, LIBRARY, Choice, Heads, choose
from .own_nodes import with_own_nodes
from .plan import Layout, Plan

if TYPE_CHECKING:  # it imports triton, which may be missing
    from ...kernels.forest_decode.api import Config

__all__ = [
    "ForestTables",
    "NodeTable",
    "SuffixTable",
    "node_addresses",
    "refusal",
    "run_kernels",
    "suffix_addresses",
]

# Suffix tokens assumed by the choice of operators, which is made once for all steps.
_TYPICAL_SUFFIX = 64


class NodeTable:
    """Device addresses of one layer's nodes.

    Args:
        forest: The nodes.
        segments: Storage of the nodes.
        device: The layer's device.

    Attributes:
        addresses: ``[3, nodes]`` int64, as `forest_decode` takes them.
    """

    def __init__(self, forest: Forest, segments: Sequence[Segment] | Mapping[int, Segment], device: torch.device):
        self.forest = forest
        self.addresses = torch.tensor(node_addresses(forest, segments), dtype=torch.int64, device=device)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Addresses are invalid in a copy of the cache, whose tensors are new: a table is copied as None.
        return type(None), ()


class SuffixTable:
    """Device addresses of one layer's suffixes, ``[4]`` int64 in `addresses`, as `forest_decode` takes them.

    Args:
        suffix: ``[rows, kv_heads, capacity, head_dim]`` each.
        first: The first token of every suffix after its own node.
    """

    def __init__(self, suffix: Segment, first: int = 0):
        self.first = first
        addresses = suffix_addresses(suffix, first)
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=suffix.keys.device)

    __reduce__ = NodeTable.__reduce__


def node_addresses(forest: Forest, segments: Sequence[Segment] | Mapping[int, Segment]) -> list[list[int]]:
    """Address of each node's keys, address of its values, and stride between KV heads in elements."""
    spans = [node.span for node in forest.nodes]
    used = {span.segment: segments[span.segment] for span in spans}

    def column(part: int) -> list[int]:  # arithmetic, because a view per node takes longer than the rest of a plan
        bases = {number: segment[part].data_ptr() for number, segment in used.items()}
        steps = {number: segment[part].stride(1) * segment[part].element_size() for number, segment in used.items()}
        return [bases[span.segment] + span.start * steps[span.segment] for span in spans]

    heads = {number: segment.keys.stride(0) for number, segment in used.items()}
    return [column(0), column(1), [heads[span.segment] for span in spans]]


def suffix_addresses(suffix: Segment, first: int = 0) -> list[int]:
    """Addresses of the suffixes' keys and values from token `first` on, and strides of rows and KV heads."""
    begin = first * suffix.keys.stride(2) * suffix.keys.element_size()
    return [suffix.keys.data_ptr() + begin, suffix.values.data_ptr() + begin, *suffix.keys.stride()[:2]]


class ForestTables:
    """Plans, schedules and lengths that all layers of a cache share, by device and head layout."""

    def __init__(self) -> None:
        self._forest: Forest | None = None
        self._chosen_for: Forest | None = None
        self._extended: tuple[Forest, int, Forest] | None = None
        self._plans: dict[tuple[Layout, torch.device], Plan] = {}
        self._schedules: dict[tuple[Layout, torch.device, int], Schedule] = {}
        self._choices: dict[tuple[Heads, torch.device], Choice] = {}
        self._lengths: dict[torch.device, tuple[int, Tensor]] = {}
        self._slots: dict[torch.device, Tensor] = {}

    def lengths(self, rows: int, before: int, device: torch.device) -> Tensor:
        """``[rows]`` int32 on the device, all `before`; filled once per step."""
        known = self._lengths.get(device)
        if known is not None and known[0] == before and len(known[1]) == rows:
            return known[1]
        with torch.inference_mode(False):  # inference tensors could not be filled outside inference mode
            if known is not None and len(known[1]) == rows:
                tensor = known[1].fill_(before)
            else:
                tensor = torch.full((rows,), before, dtype=torch.int32, device=device)
        self._lengths[device] = before, tensor
        return tensor

    def slots(self, rows: int, device: torch.device) -> Tensor:
        """``[rows]`` int32 on the device: row ``i`` uses slot ``i``."""
        if device not in self._slots or len(self._slots[device]) != rows:
            self._slots[device] = torch.arange(rows, dtype=torch.int32, device=device)
        return self._slots[device]

    def forest_with(self, forest: Forest, own: int) -> Forest:
        """The forest with own nodes of `own` tokens; the same object for the same arguments."""
        if self._extended is None or self._extended[0] is not forest or self._extended[1] != own:
            self._extended = forest, own, with_own_nodes(forest, own)
        return self._extended[2]

    def attend(
        self,
        query: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
        nodes: NodeTable,
        suffix: SuffixTable,
        before: int,
        scoring: Scoring,
        origins: Tensor | None = None,
    ) -> Tensor:
        """Append new keys and values after `before` tokens of the suffixes, and attend.

        Args:
            query: ``[rows, heads, queries, head_dim]``.
            new_keys: ``[rows, kv_heads, queries, head_dim]``.
            new_values: The same shape.
            nodes: This layer's nodes, including own nodes.
            suffix: This layer's suffixes after own nodes, with room for the new tokens.
            before: Tokens in every suffix, including own nodes.
            scoring: The layer's score options.
            origins: See `forest_decode`.

        Returns:
            ``[rows, heads, queries, head_dim]`` in the query's dtype.

        Raises:
            KernelFailedError: A kernel cannot be compiled or launched. Unless `refusal` now gives a reason, the next
                call uses another kernel.
        """
        rows, before = len(query), before - suffix.first
        if self._forest is not nodes.forest:
            self._forest, self._plans, self._schedules = nodes.forest, {}, {}
        layout = Layout.of(query, new_keys, scoring)
        plan = self._plan(layout, query.device)
        programs = plan.programs(before)
        schedule = self._schedule(plan, programs)
        slots, lengths = self.slots(rows, query.device), self.lengths(rows, before, query.device)
        tables = (nodes.addresses, suffix.addresses, slots, lengths, schedule, plan.config_of(programs))
        try:
            return run_kernels(query, new_keys, new_values, *tables, scoring, origins)
        except KernelFailedError:
            self._plans, self._schedules = {}, {}  # they may be for the kernel that failed
            raise

    def choice(self, forest: Forest, heads: Heads, device: torch.device) -> Choice:
        """The choice of the cost model between kernels and PyTorch's operators over this forest."""
        if self._chosen_for is not forest:
            self._chosen_for, self._choices = forest, {}
        if (heads, device) not in self._choices:
            # The model leaves out the masked edge of a window, which costs PyTorch's operators extra.
            among = (KERNELS, LIBRARY) if heads.window is None else (KERNELS,)
            chosen = choose(forest, _TYPICAL_SUFFIX, heads, device, among=among)
            self._choices[heads, device] = chosen
        return self._choices[heads, device]

    def _plan(self, layout: Layout, device: torch.device) -> Plan:
        if (layout, device) not in self._plans:
            assert self._forest is not None
            self._plans[layout, device] = Plan(self._forest, layout, device)
        return self._plans[layout, device]

    def _schedule(self, plan: Plan, programs: int) -> Schedule:
        key = plan.layout, plan.device, programs
        if key not in self._schedules:
            self._schedules[key] = plan.schedule(programs)
        return self._schedules[key]


def run_kernels(
    query: Tensor,
    new_keys: Tensor,
    new_values: Tensor,
    nodes: Tensor,
    suffix: Tensor,
    slots: Tensor,
    lengths: Tensor,
    schedule: Schedule,
    config: Config,
    scoring: Scoring,
    origins: Tensor | None = None,
) -> Tensor:
    """`forest_decode` on tensors of any strides and any device; arguments and result as there."""
    from ...kernels.forest_decode.api import forest_decode

    if query.stride(-1) != 1:
        query = query.contiguous()
    if new_keys.stride(-1) != 1:
        new_keys = new_keys.contiguous()
    if new_values.stride(-1) != 1:
        new_values = new_values.contiguous()
    tables = (nodes, suffix, slots, lengths, schedule, config)
    with torch.cuda.device_of(query):  # Triton launches on the current device, not on its arguments'
        out, _ = forest_decode(
            query,
            new_keys,
            new_values,
            *tables,
            scale=scoring.scale,
            soft_cap=scoring.softcap,
            window=scoring.window,
            sinks=scoring.sinks,
            origins=origins,
        )
    return out
