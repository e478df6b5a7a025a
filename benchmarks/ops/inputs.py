"""Random inputs of operator cases, in as many sets as it takes for the L2 cache to hold none of the next one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from hf_fastdecode.attention.forest import Forest, Node, Span
from hf_fastdecode.attention.kv import ForestKV, Segment

from .cases import NodeSpec, OpCase


@dataclass(frozen=True)
class NodeBatch:
    """Neighbouring nodes of one depth with equal lengths and numbers of rows, as one batch; `row_stop` is excluded.

    Keys and values are ``[nodes, kv_heads, length, head_dim]``.
    """

    row_start: int
    row_stop: int
    keys: Tensor
    values: Tensor


@dataclass(frozen=True)
class OpInputs:
    """One set of inputs of a case.

    Attributes:
        forest: The nodes, end to end in one segment.
        segment: Keys and values of all nodes, ``[kv_heads, tokens, head_dim]`` each.
        suffix: ``[rows, kv_heads, suffix, head_dim]`` each; the last token is the new one.
        query: ``[rows, heads, 1, head_dim]``.
        new: Keys and values of the new token, ``[rows, kv_heads, 1, head_dim]`` each.
    """

    case: OpCase
    forest: Forest
    segment: Segment
    suffix: Segment
    query: Tensor
    new: Segment

    @property
    def scale(self) -> float:
        """Factor on the scores."""
        return float(self.query.shape[-1]) ** -0.5

    @property
    def segments(self) -> dict[int, Segment]:
        """Storage of the nodes."""
        return {0: self.segment}

    @property
    def version(self) -> object:
        """The version of the storage, which does not move."""
        return self.case

    @property
    def kv(self) -> ForestKV:
        """Keys and values as the reference takes them."""
        return ForestKV(self.forest, [self.segment], self.suffix, self.case.suffix)

    def levels(self) -> list[list[NodeBatch]]:
        """The nodes by depth, in batches of alike ones, without a copy."""
        levels, start = [], 0
        for _, level in groupby(self.case.nodes, lambda node: node.depth):
            batches = []
            for (length, row_count), run in groupby(level, lambda node: (node.length, node.row_count)):
                nodes = list(run)
                keys, values = (_batch(part, start, length, len(nodes)) for part in self.segment)
                batches.append(NodeBatch(nodes[0].row_start, nodes[-1].row_start + row_count, keys, values))
                start += length * len(nodes)
            levels.append(batches)
        return levels


def _batch(stored: Tensor, start: int, length: int, count: int) -> Tensor:
    whole = stored[:, start : start + count * length]  # [kv_heads, count * length, head_dim]
    return whole.unflatten(1, (count, length)).transpose(0, 1)


def sets_needed(bytes_of_one: int, device: torch.device, *, most: int = 256) -> int:
    """How many sets of so many bytes are twice the L2 cache: 1 on a CPU, else 2 at least unless one is far larger."""
    if device.type != "cuda":
        return 1
    cache: int = torch.cuda.get_device_properties(device).L2_cache_size
    return 1 if bytes_of_one > 8 * cache else min(most, max(2, math.ceil(2 * cache / bytes_of_one)))


def make_inputs(case: OpCase, device: torch.device, *, sets: int | None = None, seed: int = 0) -> list[OpInputs]:
    """Sets of inputs of a case, drawn from a normal distribution; torch.OutOfMemoryError where they do not fit."""
    dtype: torch.dtype = getattr(torch, case.dtype)
    sets = sets or sets_needed(case.bytes(dtype.itemsize), device)
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(sets, *shape, generator=generator, device=device, dtype=dtype)

    rows, kv_heads, head_dim = case.rows, case.kv_heads, case.head_dim
    nodes = [normal(kv_heads, case.stored_tokens, head_dim) for _ in range(2)]
    suffixes = [normal(rows, kv_heads, case.suffix, head_dim) for _ in range(2)]
    queries = normal(rows, case.heads, 1, head_dim)
    forest = make_forest(case.rows, case.nodes)
    return [
        OpInputs(
            case,
            forest,
            Segment(nodes[0][index], nodes[1][index]),
            Segment(suffixes[0][index], suffixes[1][index]),
            queries[index],
            Segment(suffixes[0][index, :, :, -1:].clone(), suffixes[1][index, :, :, -1:].clone()),
        )
        for index in range(sets)
    ]


def make_forest(rows: int, nodes: tuple[NodeSpec, ...]) -> Forest:
    """The forest of a case, its nodes end to end in segment 0."""
    start, placed = 0, []
    for node in nodes:
        placed.append(Node(Span(0, start, node.length), node.row_start, node.row_count, node.depth))
        start += node.length
    return Forest(rows, placed)
