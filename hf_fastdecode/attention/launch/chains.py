"""Chains: short nodes read together with the nodes below them.

A node that is attended to by itself costs a piece of work, however short, and a partial of every row's queries, which
is written and merged. Where nodes are short and levels many, as in trees of prefixes, that takes longer than reading
their keys again, from the L2 cache, with those of each node below (FastTree weighs the same). The query tiles of a
node then attend to its *chain*: the short nodes above it, and itself. Every row still attends to every token once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...kernels.forest_decode.schedule import NodeShape, longest_share
from ..forest import Forest, Node

if TYPE_CHECKING:  # it imports triton, which may be missing
    from ...kernels.forest_decode.config import Config

_PIECE_TILES = 2.0
"""What a piece of work costs, in key tiles: less than `PIECE_COST`, as programs of a multiprocessor wait together."""

_MERGED_QUERIES = 32
"""Queries whose partials take as long to write and merge as a key tile to read: bytes of either."""


def choose_chains(
    forest: Forest, kv_heads: int, queries_per_kv_head: int, head_dim: int, wide: Config, multiprocessors: int
) -> Config:
    """Launch parameters with chains where these are predicted to be faster than `wide`, which are without.

    Measured on an H200, for trees of several levels whose widest node needs a query tile of 64 or more. Own nodes (see
    `own_segment`) do not count.
    """
    from ...kernels.forest_decode.config import CHAINED

    forest = _without_own_nodes(forest)
    if len(forest.levels) < 2 or wide.block_m < 64 or head_dim > 128:
        return wide
    sizes = (kv_heads, queries_per_kv_head)
    times = {config: _microseconds(forest, *sizes, config, multiprocessors) for config in (*CHAINED, wide)}
    chained = min(CHAINED, key=times.__getitem__)
    return chained if _CLEARLY_FASTER * times[chained] < times[wide] else wide


def chains_may_stay(
    forest: Forest, kv_heads: int, queries_per_kv_head: int, chained: Config, wide: Config, multiprocessors: int
) -> bool:
    """Whether a step captured with chains serves a forest for which `choose_chains` returns `wide`, about as fast.

    Trees of a program that differ a little from call to call would otherwise be captured twice.
    """
    from ...kernels.forest_decode.config import CHAINED

    forest, sizes = _without_own_nodes(forest), (kv_heads, queries_per_kv_head)
    if chained not in CHAINED or len(forest.levels) < 2 or wide.block_m < 64:
        return False
    staying, changing = (_microseconds(forest, *sizes, config, multiprocessors) for config in (chained, wide))
    return staying <= _CLEARLY_FASTER * changing


def _without_own_nodes(forest: Forest) -> Forest:
    """The forest of shared nodes: own nodes come and go while a step's launches stay."""
    if all(node.span.segment >= 0 for node in forest.nodes):
        return forest
    return Forest(forest.rows, [node for node in forest.nodes if node.span.segment >= 0])


def _microseconds(
    forest: Forest, kv_heads: int, queries_per_kv_head: int, config: Config, multiprocessors: int
) -> float:
    """Predicted time of attention to the nodes, without what takes the same time with other launch parameters."""
    from ...kernels.forest_decode.config import CHAINED

    shapes = node_shapes(forest, queries_per_kv_head, config)
    share = longest_share(
        shapes,
        kv_heads=kv_heads,
        queries=queries_per_kv_head,
        block_m=config.block_m,
        block_n=config.block_n,
        programs=config.per_sm * multiprocessors,
    )
    depths = 1 + max(shape.depth for shape in shapes)
    if config in CHAINED:
        return depths + CHAINED[config] * share
    return depths + (_HOPPER_START + _HOPPER_TILE * share if config.hopper else _WIDE_TILE * share)


# Microseconds of a key tile, and of what the Hopper kernel does before its first. Those of `CHAINED` and these are
# fitted to the trees of FastTree.
_HOPPER_START, _HOPPER_TILE, _WIDE_TILE = 6.0, 1.5, 2.0

_CLEARLY_FASTER = 1.25  # without chains, suffixes may be attended to beside the nodes, which is not predicted


def node_shapes(forest: Forest, queries_per_kv_head: int, config: Config) -> list[NodeShape]:
    """The nodes that the kernels attend to, by depth and row: all, or with chains those at the chains' ends.

    Depths are counted anew, as nodes inside chains have none.
    """
    if config.chain == 1:
        return [NodeShape(node.depth, node.row_start, node.row_count, node.span.length) for node in forest.nodes]
    found: list[NodeShape] = []
    below = _children(forest)
    # Nodes above come first: their depth among the nodes that are left, and the chain that they pass on.
    passed: dict[int, tuple[int, tuple[tuple[int, int], ...]]] = {}
    for index, node in enumerate(forest.nodes):
        depth, chain = passed.pop(index, (0, ()))
        chain = (*chain, (index, node.span.length))
        tokens = sum(length for _, length in chain)
        children = [forest.nodes[child] for child in below[index]]
        if len(chain) < config.chain and _pays(node, children, tokens, queries_per_kv_head, config):
            passed |= dict.fromkeys(below[index], (depth, chain))
        else:
            found.append(NodeShape(depth, node.row_start, node.row_count, tokens, chain))
            passed |= dict.fromkeys(below[index], (depth + 1, ()))
    return sorted(found)


def _pays(node: Node, children: Sequence[Node], tokens: int, queries: int, config: Config) -> bool:
    """Whether reading `tokens` with each child costs less than with the node itself; all its rows must have one."""
    if sum(child.row_count for child in children) < node.row_count:
        return False
    key_tiles = tokens / config.block_n
    merged = node.row_count * queries / _MERGED_QUERIES
    return _query_tiles(children, queries, config) * key_tiles < (
        _query_tiles([node], queries, config) * (key_tiles + _PIECE_TILES) + merged
    )


def _query_tiles(nodes: Sequence[Node], queries: int, config: Config) -> int:
    return sum(-(-node.row_count * queries // config.block_m) for node in nodes)


def _children(forest: Forest) -> list[list[int]]:
    """Indices of the nodes below each node."""
    below: list[list[int]] = [[] for _ in forest.nodes]
    above, first = [-1] * forest.rows, 0
    for level in forest.levels:
        for index, node in enumerate(level, start=first):
            if above[node.row_start] >= 0:
                below[above[node.row_start]].append(index)
            above[node.row_start : node.row_stop] = [index] * node.row_count
        first += len(level)
    return below
