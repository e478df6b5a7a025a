"""Own nodes: long suffixes attended to as nodes of one row each, without a copy.

The suffix kernel runs one program per row and KV head. While these are too few to fill the GPU, the head of every
suffix becomes a node below its row's path, for the node kernel, which divides all keys equally whatever their rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from ...kernels.forest_decode.limits import multiprocessors
from ..forest import Forest, Node, Span
from ..kv import Segment

STEP: Final = 128
"""Tokens by which own nodes grow; the suffix kernel reads fewer than so many tokens per row."""

_NARROW: Final = 16
"""Packed queries of the smallest query tile."""


def may_have_own_nodes(rows: int, kv_heads: int, group: int, device: torch.device) -> bool:
    """Whether rows gain from own nodes once their suffixes are long.

    They do until the suffix kernel's programs, one per row and KV head, fill the GPU. Where rows share a node, its
    query tiles may be wider than one row and are mostly padding for own nodes; these then gain only while half of the
    multiprocessors would be idle. (Measured on an H200: 16 rows of 4,096 tokens, 32 KV heads of one query head each:
    280 us, without own nodes 350; 8 KV heads of four: 96 and 82.)

    Args:
        rows: Rows of the step.
        kv_heads: KV heads of the layer.
        group: Query heads per KV head.
        device: Device of the layer.
    """
    fills = 4.0 if rows * group <= _NARROW else 0.5
    return rows * kv_heads <= fills * multiprocessors(device)


def own_tokens(suffix_length: int) -> int:
    """Leading tokens of a suffix that become its own node."""
    return suffix_length // STEP * STEP


def with_own_nodes(forest: Forest, tokens: int) -> Forest:
    """The forest with a node of `tokens` tokens below every row's path; the same object for 0 tokens."""
    if not tokens:
        return forest
    own = [Node(Span(_segment(row), 0, tokens), row, 1, len(path)) for row, path in enumerate(forest.paths)]
    return Forest(forest.rows, [*forest.nodes, *own])


def with_own_segments(segments: Sequence[Segment] | Mapping[int, Segment], suffix: Segment) -> Mapping[int, Segment]:
    """Segments by number, with those of own nodes added.

    Args:
        segments: Segments of the shared nodes.
        suffix: ``[rows, kv_heads, capacity, head_dim]`` each.
    """
    shared = segments if isinstance(segments, Mapping) else dict(enumerate(segments))
    own = {_segment(row): Segment(*parts) for row, parts in enumerate(zip(*suffix, strict=True))}
    return {**shared, **own}


def _segment(row: int) -> int:
    """Segment number of a row's suffix: negative, because shared segments count from 0."""
    return -1 - row
