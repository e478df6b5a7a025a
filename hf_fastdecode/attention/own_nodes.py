"""Long suffixes attended to as nodes of one row each, where they lie.

The suffix kernel runs one program for each row and KV head. As long as these are too few to fill the GPU, all but the
last tokens of every suffix are shown to the node kernel, which cuts all keys into equal shares, whatever their rows: a
node below each row's path, whose span is the head of the row's own suffix. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch

from ..kernels.forest_decode.limits import multiprocessors
from .forest import Forest, Node, Span
from .kv import Segment

STEP: Final = 128
"""Tokens by which own nodes grow: a suffix kernel then reads fewer than so many tokens of a row."""

_NARROW: Final = 16
"""Packed queries of the smallest tile."""


def may_have_own_nodes(rows: int, kv_heads: int, group: int, device: torch.device) -> bool:
    """Whether rows gain from own nodes once their suffixes are long.

    They do until the suffix kernel's programs, one for each row and KV head, fill the GPU. A node that all rows share
    may need query tiles that are wider than a row; these are wasted on own nodes, which then gain only where half of
    the multiprocessors would else be idle. (Measured on an H200: 16 rows of 4,096 tokens, 32 KV heads of one query
    head each: 280 us, without own nodes 350; 8 KV heads of four: 96 and 82.)

    Args:
        rows: Rows of the step.
        kv_heads: KV heads of the layer.
        group: Query heads for each.
        device: Where it runs.
    """
    fills = 4.0 if rows * group <= _NARROW else 0.5
    return rows * kv_heads <= fills * multiprocessors(device)


def own_tokens(suffix_length: int) -> int:
    """How many leading tokens of a suffix are attended to as a node, where own nodes are used."""
    return suffix_length // STEP * STEP


def with_own_nodes(forest: Forest, tokens: int) -> Forest:
    """The forest with a node of so many tokens below every row's path; the same one for 0 tokens."""
    if not tokens:
        return forest
    own = [Node(Span(_segment(row), 0, tokens), row, 1, len(path)) for row, path in enumerate(forest.paths)]
    return Forest(forest.rows, [*forest.nodes, *own])


def with_own_segments(segments: Sequence[Segment] | Mapping[int, Segment], suffix: Segment) -> Mapping[int, Segment]:
    """Storage by number, in which the spans of own nodes are found too.

    Args:
        segments: Of the other nodes.
        suffix: ``[rows, kv_heads, capacity, head_dim]`` each.
    """
    shared = segments if isinstance(segments, Mapping) else dict(enumerate(segments))
    own = {_segment(row): Segment(*parts) for row, parts in enumerate(zip(*suffix, strict=True))}
    return {**shared, **own}


def _segment(row: int) -> int:
    """The number that stands for a row's suffix; segments of nodes count from 0 up."""
    return -1 - row
