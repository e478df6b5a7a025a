"""Attention over a forest with this package's kernels: what stays the same over a step's layers and over steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..kernels.forest_decode.limits import compute_capability, multiprocessors, refusal, shared_memory
from ..kernels.forest_decode.schedule import Capacity, NodeShape, Schedule, make_schedule
from .dispatch import KERNELS, LIBRARY, Choice, Heads, choose
from .forest import Forest
from .kv import Segment
from .scoring import Scoring

if TYPE_CHECKING:  # it imports triton, which may be missing
    from ..kernels.forest_decode.api import Config

__all__ = [
    "ForestTables",
    "Layout",
    "NodeTable",
    "SuffixTable",
    "decode_config",
    "forest_schedule",
    "node_addresses",
    "node_shapes",
    "refusal",
    "run_kernels",
    "suffix_addresses",
]

# What a suffix is taken to hold where the choice of operators is made once for all steps.
_TYPICAL_SUFFIX = 64


class Layout(NamedTuple):
    """What of a layer decides its schedule.

    Attributes:
        kv_heads: KV heads.
        each: Packed queries of one row for a KV head.
        head_dim: Numbers per head.
        windowed: Whether a sliding window binds.
    """

    kv_heads: int
    each: int
    head_dim: int
    windowed: bool

    @classmethod
    def of(cls, query: Tensor, keys: Tensor, scoring: Scoring) -> Layout:
        """The layout of queries ``[rows, heads, queries, head_dim]`` over new keys ``[rows, kv_heads, ...]``."""
        _, heads, queries, head_dim = query.shape
        kv_heads = keys.shape[1]
        return cls(kv_heads, heads // kv_heads * queries, head_dim, scoring.window is not None)


class NodeTable:
    """Device addresses of one layer's nodes.

    Args:
        forest: The nodes.
        segments: Where their tokens are stored.
        device: The layer's device.

    Attributes:
        addresses: ``[3, nodes]`` int64, as `forest_decode` takes them.
    """

    def __init__(self, forest: Forest, segments: Sequence[Segment] | Mapping[int, Segment], device: torch.device):
        self.forest = forest
        self.addresses = torch.tensor(node_addresses(forest, segments), dtype=torch.int64, device=device)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Addresses mean nothing in a copy of the cache, whose tensors lie elsewhere: a copy of a table is None.
        return type(None), ()


class SuffixTable:
    """Device addresses of one layer's suffixes, ``[4]`` int64 in `addresses`, as `forest_decode` takes them."""

    def __init__(self, suffix: Segment):
        self.addresses = torch.tensor(suffix_addresses(suffix), dtype=torch.int64, device=suffix.keys.device)

    __reduce__ = NodeTable.__reduce__


def node_addresses(forest: Forest, segments: Sequence[Segment] | Mapping[int, Segment]) -> list[list[int]]:
    """Of each node: addresses of its keys, of its values, and elements from one KV head to the next."""
    views = [segments[node.span.segment].view(node.span) for node in forest.nodes]
    return [
        [view.keys.data_ptr() for view in views],
        [view.values.data_ptr() for view in views],
        [view.keys.stride(0) for view in views],
    ]


def suffix_addresses(suffix: Segment) -> list[int]:
    """Addresses of the suffixes' keys and values, and elements from one row and from one KV head to the next."""
    return [suffix.keys.data_ptr(), suffix.values.data_ptr(), *suffix.keys.stride()[:2]]


class ForestTables:
    """Schedules and lengths that all layers of a cache share, by device and head counts."""

    def __init__(self) -> None:
        self._forest: Forest | None = None
        self._schedules: dict[tuple[Layout, torch.device], tuple[Schedule, Config]] = {}
        self._choices: dict[tuple[Heads, torch.device], Choice] = {}
        self._lengths: dict[torch.device, tuple[int, Tensor]] = {}
        self._slots: dict[torch.device, Tensor] = {}

    def lengths(self, rows: int, before: int, device: torch.device) -> Tensor:
        """``[rows]`` int32 on the device, all `before`: filled once a step, for the first layer that asks."""
        known = self._lengths.get(device)
        if known is not None and known[0] == before and len(known[1]) == rows:
            return known[1]
        if known is not None and len(known[1]) == rows:
            tensor = known[1].fill_(before)
        else:
            tensor = torch.full((rows,), before, dtype=torch.int32, device=device)
        self._lengths[device] = before, tensor
        return tensor

    def slots(self, rows: int, device: torch.device) -> Tensor:
        """``[rows]`` int32 on the device: every row's suffix lies in its own place."""
        if device not in self._slots or len(self._slots[device]) != rows:
            self._slots[device] = torch.arange(rows, dtype=torch.int32, device=device)
        return self._slots[device]

    def attend(
        self,
        query: Tensor,
        new_keys: Tensor,
        new_values: Tensor,
        nodes: NodeTable,
        suffix: SuffixTable,
        before: int,
        scoring: Scoring,
    ) -> Tensor:
        """Append new keys and values behind `before` tokens of the suffixes, and attend.

        Args:
            query: ``[rows, heads, queries, head_dim]``.
            new_keys: ``[rows, kv_heads, queries, head_dim]``.
            new_values: The same shape.
            nodes: This layer's nodes.
            suffix: This layer's suffixes, with room for the new tokens.
            before: Tokens in every suffix.
            scoring: What the layer does to its scores.

        Returns:
            ``[rows, heads, queries, head_dim]`` in the query's dtype.
        """
        rows = len(query)
        schedule, config = self._schedule(nodes.forest, Layout.of(query, new_keys, scoring), query.device)
        slots, lengths = self.slots(rows, query.device), self.lengths(rows, before, query.device)
        tables = (nodes.addresses, suffix.addresses, slots, lengths, schedule, config)
        return run_kernels(query, new_keys, new_values, *tables, scoring)

    def choice(self, forest: Forest, heads: Heads, device: torch.device) -> Choice:
        """Kernels or PyTorch's operators, whichever the cost model predicts to be faster over this forest."""
        self._turn_to(forest)
        if (heads, device) not in self._choices:
            # What PyTorch's operators do at the edge of a window, by a mask, is not in the model.
            among = (KERNELS, LIBRARY) if heads.window is None else (KERNELS,)
            chosen = choose(forest, _TYPICAL_SUFFIX, heads, device, among=among)
            self._choices[heads, device] = chosen
        return self._choices[heads, device]

    def _turn_to(self, forest: Forest) -> None:
        if self._forest is not forest:
            self._forest, self._schedules, self._choices = forest, {}, {}

    def _schedule(self, forest: Forest, layout: Layout, device: torch.device) -> tuple[Schedule, Config]:
        self._turn_to(forest)
        if (layout, device) not in self._schedules:
            config = decode_config(forest, layout, device)
            self._schedules[layout, device] = forest_schedule(forest, layout, config, device), config
        return self._schedules[layout, device]


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
) -> Tensor:
    """`forest_decode` on tensors as models make them: any strides, any device. Arguments and result as there."""
    from ..kernels.forest_decode.api import forest_decode

    if query.stride(-1) != 1:
        query = query.contiguous()
    if new_keys.stride(-1) != 1:
        new_keys = new_keys.contiguous()
    if new_values.stride(-1) != 1:
        new_values = new_values.contiguous()
    tables = (nodes, suffix, slots, lengths, schedule, config)
    with torch.cuda.device_of(query):  # Triton launches on the current device, whatever its arguments' is
        out, _ = forest_decode(
            query,
            new_keys,
            new_values,
            *tables,
            scale=scoring.scale,
            soft_cap=scoring.softcap,
            window=scoring.window,
            sinks=scoring.sinks,
        )
    return out


def decode_config(forest: Forest, layout: Layout, device: torch.device) -> Config:
    """Launch parameters for a layer over a forest."""
    from ..kernels.forest_decode.api import choose_config

    return choose_config(
        max((node.row_count for node in forest.nodes), default=1) * layout.each,
        layout.head_dim,
        windowed=layout.windowed,
        overlap=device.type == "cuda" and compute_capability(device) >= (9, 0),
        shared_memory=shared_memory(device),
        device=device,
    )


def node_shapes(forest: Forest) -> list[NodeShape]:
    """What of the nodes decides the work."""
    return [NodeShape(node.depth, node.row_start, node.row_count, node.span.length) for node in forest.nodes]


def forest_schedule(
    forest: Forest,
    layout: Layout,
    config: Config,
    device: torch.device,
    *,
    rows: int | None = None,
    capacity: Capacity | None = None,
) -> Schedule:
    """The schedule of a forest's nodes.

    Args:
        forest: The nodes.
        layout: Of the layer.
        config: From `decode_config`.
        device: Where the tables go.
        rows: Rows of the step when it has more than the forest.
        capacity: Sizes of the tables, when they must not depend on the nodes.
    """
    return make_schedule(
        node_shapes(forest),
        rows or forest.rows,
        kv_heads=layout.kv_heads,
        queries=layout.each,
        block_m=config.block_m,
        block_n=config.block_n,
        programs=config.per_sm * multiprocessors(device),
        device=device,
        capacity=capacity,
    )
