"""Launch plan of the kernels over a forest: launch parameters, schedules as suffixes grow, chains, and own nodes.

Chains: a node that is attended to by itself costs a piece of work, however short, and a partial of every row's
queries, which is written and merged. Where nodes are short and levels many, as in trees of prefixes, that takes longer
than reading their keys again, from the L2 cache, with those of each node below (FastTree weighs the same). The query
tiles of a node then attend to its *chain*: the short nodes above it, and itself. Every row still attends to every
token once.

Own nodes: the suffix kernel runs one program per row and KV head. While these are too few to fill the GPU, the head of
every suffix becomes a node below its row's path, without a copy, for the node kernel, which divides all keys equally
whatever their rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Final, NamedTuple

import torch
from torch import Tensor

from ...kernels.device import compute_capability, multiprocessors, shared_memory
from ...kernels.forest_decode.config import CHAINED, Config
from ...kernels.forest_decode.schedule import (
    BUNDLE,
    Capacity,
    NodeShape,
    Schedule,
    longest_share,
    make_schedule,
    needed_capacity,
)
from ..forest import Forest, Node, Span
from ..kv import Scoring
from .costs import costs_of

_QUERY_TILE = 128  # packed queries that read a node's keys at once, at most

# Launch parameters that depend on context lengths.
_BY_LENGTH = ("block_n", "stages", "suffix")

_KEY_AND_VALUE_BYTES = 4  # one element of each, in half precision: the kernels take no other on a GPU


class HeadShape(NamedTuple):
    """Heads of a layer, as far as schedules and launch parameters depend on them: layers of one shape share them."""

    kv_heads: int
    queries_per_kv_head: int  # packed queries of one row per KV head
    head_dim: int
    windowed: bool  # whether scores depend on positions: a sliding window binds, or keys are biased by distance
    latents: bool = False  # whether keys are latents, of which `head_dim` elements are read
    rest: int = 0  # elements of keys beside `head_dim`, stored once for all KV heads
    biased: bool = False  # whether keys are biased by distance

    @classmethod
    def of(cls, query: Tensor, keys: Tensor, scoring: Scoring, *, rest: int = 0) -> HeadShape:
        """The shape of queries ``[rows, heads, queries, head_dim + rest]`` over keys ``[rows, kv_heads, ...]``."""
        _, heads, queries, width = query.shape
        kv_heads, head_dim = keys.shape[1], width - rest
        biased, latents = scoring.distances is not None, keys.shape[-1] != head_dim
        windowed = biased or scoring.window is not None
        return cls(kv_heads, heads // kv_heads * queries, head_dim, windowed, latents, rest, biased)

    def schedule_sizes(self, config: Config) -> dict[str, int]:
        """Sizes of `make_schedule` with these launch parameters."""
        blocks = {"block_m": config.block_m, "block_n": config.block_n}
        return {"kv_heads": self.kv_heads, "queries": self.queries_per_kv_head, **blocks}


class LaunchPlan:
    """Launch parameters and schedules of a layer's kernels over a forest.

    Args:
        rows: Rows of the step; the forest's by default, more for a captured step that serves smaller batches too.
        own_dominate: Choose launch parameters for own nodes, see `OwnNodes`.
        config: Launch parameters, such as those of a captured graph; chosen when None.

    Attributes:
        grid: Programs that the device runs at once.
    """

    def __init__(
        self,
        forest: Forest,
        shape: HeadShape,
        device: torch.device,
        *,
        rows: int | None = None,
        own_dominate: bool = False,
        config: Config | None = None,
    ):
        self.forest, self.shape, self.device, self.rows = forest, shape, device, rows or forest.rows
        self.config = config or decode_config(forest, shape, device, self.rows, own_dominate=own_dominate)
        self.grid = self.config.per_sm * multiprocessors(device)
        self._last_asked = 0, self.grid
        self._node_shapes = node_shapes(forest, shape.queries_per_kv_head, self.config)
        self._sizes = shape.schedule_sizes(self.config)

    @cached_property
    def needed(self) -> Capacity:
        """The capacity that the schedule needs."""
        sizes = {name: size for name, size in self._sizes.items() if name != "block_n"}
        return needed_capacity(self._node_shapes, **sizes)

    def programs(self, suffix_tokens: int) -> int:
        """How many programs the node kernel should use at this suffix length.

        All, until suffixes are so long that running them beside the nodes is faster: the nodes' matrix products and
        the suffixes' memory reads then overlap.
        """
        if not self.config.overlap_suffix or not suffix_tokens:
            return self.grid
        if suffix_tokens != self._last_asked[0]:  # every layer of a step asks for the same length
            chosen = min(self._node_seconds, key=lambda programs: self._seconds(programs, suffix_tokens))
            self._last_asked = suffix_tokens, chosen
        return self._last_asked[1]

    def _seconds(self, programs: int, suffix_tokens: int) -> float:
        """Predicted seconds of a layer's attention with so many programs for nodes."""
        costs = costs_of(self.device)
        numbers = self.forest.rows * self.shape.kv_heads * self.shape.head_dim
        suffix_bytes = _KEY_AND_VALUE_BYTES * numbers * suffix_tokens
        node_seconds = self._node_seconds[programs]
        if programs == self.grid:
            return node_seconds + suffix_bytes / costs.suffix_bandwidth
        read_beside = node_seconds * min((self.grid - programs) * costs.beside_bandwidth, costs.suffix_bandwidth)
        in_turn = node_seconds + max(0.0, suffix_bytes - read_beside) / costs.suffix_bandwidth
        # The third launch reads partials that the second one wrote. Its own launch is not counted, because overlap
        # saves as much: suffixes need not start after the nodes.
        merge = 8 * numbers * self.shape.queries_per_kv_head / costs.suffix_bandwidth
        return max(in_turn, (self._node_bytes + suffix_bytes) / costs.bandwidth) + merge

    @cached_property
    def _node_seconds(self) -> dict[int, float]:
        """Predicted seconds of the nodes alone, by number of programs: the grid, or fewer where that may be faster."""
        costs = costs_of(self.device)
        tile = 4 * self.config.block_m * self.config.block_n * self.shape.head_dim / (costs.rate / self.grid)
        fewer = range(self.grid * 4 // 5 // BUNDLE * BUNDLE, self.grid // 2, -BUNDLE)
        return {
            programs: max(
                tile * longest_share(self._node_shapes, **self._sizes, programs=programs),
                self._node_bytes / costs.bandwidth,
            )
            for programs in (self.grid, *fewer)
        }

    @cached_property
    def _node_bytes(self) -> int:
        numbers = self.shape.kv_heads * self.shape.head_dim * self.forest.node_tokens
        return _KEY_AND_VALUE_BYTES * numbers

    def schedule(self, programs: int, capacity: Capacity | None = None) -> Schedule:
        """Build the schedule of the nodes.

        Args:
            programs: As chosen by `programs`.
            capacity: Sizes of the tables, when they must not depend on the nodes.
        """
        return make_schedule(
            self._node_shapes,
            self.rows,
            **self._sizes,
            programs=programs,
            device=self.device,
            capacity=capacity,
            grid=self.grid,
            chain=self.config.chain,
        )


def may_stay(forest: Forest, shape: HeadShape, device: torch.device, chosen: Config, kept: Config) -> bool:
    """Whether a step captured with launch parameters `kept` serves a forest for which `chosen` are chosen.

    Those that depend on context lengths may differ: key tiles, stages and suffix parameters. Results then differ in
    rounding.
    """
    if kept == replace(chosen, **{name: getattr(kept, name) for name in _BY_LENGTH}):
        return True
    return chosen.chain == 1 < kept.chain and chains_may_stay(forest, shape, kept, chosen, multiprocessors(device))


def decode_config(
    forest: Forest, shape: HeadShape, device: torch.device, rows: int, *, own_dominate: bool = False
) -> Config:
    """Launch parameters of a layer over a forest, for steps of `rows` rows; arguments as for `LaunchPlan`."""
    from ...kernels.forest_decode.api import choose_config  # it imports triton, which may be missing

    keys = shape.kv_heads * sum(
        node.span.length * -(-node.row_count * shape.queries_per_kv_head // _QUERY_TILE) for node in forest.nodes
    )
    has_pdl = device.type == "cuda" and compute_capability(device) >= (9, 0)
    config = choose_config(
        max((node.row_count for node in forest.nodes), default=1) * shape.queries_per_kv_head,
        **shape._asdict(),
        rows=rows,
        keys=keys // multiprocessors(device),
        own_dominate=own_dominate,
        overlap=has_pdl,
        shared_memory=shared_memory(device),
        device=device,
    )
    if shape.windowed or shape.latents or shape.rest or own_dominate or not has_pdl:
        return config
    return choose_chains(forest, shape, config, multiprocessors(device))


# Cost of a piece of work, in key tiles: less than `PIECE_COST`, as programs of a multiprocessor wait together.
_PIECE_TILES = 2.0
# Queries whose partials take as long to write and merge as a key tile to read: bytes of either.
_MERGED_QUERIES = 32


def choose_chains(forest: Forest, shape: HeadShape, wide: Config, multiprocessors: int) -> Config:
    """Launch parameters with chains where these are predicted to be faster than `wide`, which are without.

    Measured on an H200, for trees of several levels whose widest node needs a query tile of 64 or more. Own nodes (see
    `own_segment`) do not count.
    """
    forest = _without_own_nodes(forest)
    if len(forest.levels) < 2 or wide.block_m < 64 or shape.head_dim > 128:
        return wide
    times = {config: _microseconds(forest, shape, config, multiprocessors) for config in (*CHAINED, wide)}
    chained = min(CHAINED, key=times.__getitem__)
    return chained if _CLEARLY_FASTER * times[chained] < times[wide] else wide


def chains_may_stay(forest: Forest, shape: HeadShape, chained: Config, wide: Config, multiprocessors: int) -> bool:
    """Whether a step captured with chains serves a forest for which `choose_chains` returns `wide`, about as fast.

    Trees of a program that differ a little from call to call would otherwise be captured twice.
    """
    forest = _without_own_nodes(forest)
    if chained not in CHAINED or len(forest.levels) < 2 or wide.block_m < 64:
        return False
    staying, changing = (_microseconds(forest, shape, config, multiprocessors) for config in (chained, wide))
    return staying <= _CLEARLY_FASTER * changing


def _without_own_nodes(forest: Forest) -> Forest:
    """The forest of shared nodes: own nodes come and go while a step's launches stay."""
    if all(node.span.segment >= 0 for node in forest.nodes):
        return forest
    return Forest(forest.rows, [node for node in forest.nodes if node.span.segment >= 0])


def _microseconds(forest: Forest, shape: HeadShape, config: Config, multiprocessors: int) -> float:
    """Predicted time of attention to the nodes, without what takes the same time with other launch parameters."""
    nodes = node_shapes(forest, shape.queries_per_kv_head, config)
    share = longest_share(nodes, **shape.schedule_sizes(config), programs=config.per_sm * multiprocessors)
    depths = 1 + max(node.depth for node in nodes)
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


STEP: Final = 128  # tokens by which own nodes grow; the suffix kernel reads fewer than so many tokens per row
_NARROW: Final = 16  # packed queries of the smallest query tile
_FEWEST_ROWS: Final = 4  # rows from which launch parameters for own nodes were measured to be faster


class OwnNodes(NamedTuple):
    """Policy for long suffixes in a step."""

    used: bool = False  # whether all but the last tokens of long suffixes are nodes
    dominate: bool = False  # whether launch parameters suit these nodes, rather than the shared ones


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
