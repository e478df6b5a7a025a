"""Own nodes: long suffixes attended to as nodes of one row each, without a copy.

The suffix kernel runs one program per row and KV head. While these are too few to fill the GPU, the head of every
suffix becomes a node below its row's path, for the node kernel, which divides all keys equally whatever their rows.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch

from ...kernels.device import multiprocessors
from ..forest import Forest, Node, Span
from .plan import HeadShape

STEP: Final = 128
"""Tokens by which own nodes grow; the suffix kernel reads fewer than so many tokens per row."""

_NARROW: Final = 16
"""Packed queries of the smallest query tile."""

_FEWEST_ROWS: Final = 4
"""Rows from which launch parameters for own nodes were measured to be faster."""


class OwnNodes(NamedTuple):
    """Policy for long suffixes in a step.

    Attributes:
        used: Whether all but the last tokens of long suffixes are nodes.
        dominate: Whether launch parameters suit these nodes, rather than the shared ones.
    """

    used: bool = False
    dominate: bool = False


NO_OWN_NODES: Final = OwnNodes()


def choose_own_nodes(rows: int, shape: HeadShape, device: torch.device, *, dominate: bool) -> OwnNodes:
    """Whether rows gain from own nodes once their suffixes are long, and from launch parameters for these.

    They gain until the suffix kernel's programs, one per row and KV head, fill the GPU. Where rows share a node, its
    query tiles may be wider than one row and are mostly padding for own nodes; unless these decide the tiles, they
    then gain only while half of the multiprocessors would be idle. (Measured on an H200, 16 rows of 4,096 tokens,
    without own nodes, with them, and with launch parameters for them: 350, 285 and 262 us for 32 KV heads of one query
    head each, 82, 96 and 71 us for 8 KV heads of four.)

    Args:
        shape: Heads of the layer; one with a sliding window gains nothing, because it does not read long suffixes.
        dominate: Whether own nodes hold most keys, see `own_nodes_dominate`.
    """
    if shape.windowed:
        return NO_OWN_NODES
    programs = rows * shape.kv_heads / multiprocessors(device)
    narrow = rows * shape.queries_per_kv_head <= _NARROW
    if dominate and programs <= (4 if narrow else 2):
        return OwnNodes(used=True, dominate=True)
    return OwnNodes(used=programs <= (4 if narrow else 0.5))


def own_nodes_dominate(forest: Forest, suffix_length: int) -> bool:
    """Whether most keys are in own nodes.

    With launch parameters for them, shared nodes are read in narrow query tiles, several times through L2. That costs
    little once own nodes hold four times as many keys.
    """
    own = forest.rows * own_tokens(suffix_length)
    return forest.rows >= _FEWEST_ROWS and own > 0 and own >= 4 * forest.node_tokens


def own_tokens(suffix_length: int) -> int:
    """Leading tokens of a suffix that become its own node."""
    return suffix_length // STEP * STEP


def with_own_nodes(forest: Forest, tokens: int) -> Forest:
    """The forest with a node of `tokens` tokens below every row's path; the same object for 0 tokens."""
    if not tokens:
        return forest
    own = [Node(Span(own_segment(row), 0, tokens), row, 1, len(path)) for row, path in enumerate(forest.paths)]
    return Forest(forest.rows, [*forest.nodes, *own])


def own_segment(row: int) -> int:
    """Segment number of a row's suffix: negative, because shared segments count from 0. Its own inverse."""
    return -1 - row
