"""Launch plan of the kernels over a forest: launch parameters, and schedules as suffixes grow."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ...kernels.device import compute_capability, multiprocessors, shared_memory
from ...kernels.forest_decode.schedule import (
    BUNDLE,
    Capacity,
    Schedule,
    longest_share,
    make_schedule,
    needed_capacity,
)
from ..forest import Forest
from ..kv import Scoring
from .chains import chains_may_stay, choose_chains, node_shapes
from .costs import QUERY_TILE, costs_of

if TYPE_CHECKING:  # it imports triton, which may be missing
    from ...kernels.forest_decode.api import Config


# Launch parameters that depend on context lengths.
_BY_LENGTH = ("block_n", "stages", "suffix")

_KEY_AND_VALUE_BYTES = 4  # one number of each, in half precision: the kernels take no other on a GPU


class HeadShape(NamedTuple):
    """Heads of a layer, as far as schedules and launch parameters depend on them: layers of one shape share them.

    Attributes:
        queries_per_kv_head: Packed queries of one row per KV head.
        windowed: Whether scores depend on positions: a sliding window binds, or keys are biased by distance.
        latents: Whether keys are latents, of which `head_dim` numbers are read.
        rest: Numbers of keys beside `head_dim`, stored once for all KV heads.
        biased: Whether keys are biased by distance.
    """

    kv_heads: int
    queries_per_kv_head: int
    head_dim: int
    windowed: bool
    latents: bool = False
    rest: int = 0
    biased: bool = False

    @classmethod
    def of(cls, query: Tensor, keys: Tensor, scoring: Scoring, *, rest: int = 0) -> HeadShape:
        """The shape of queries ``[rows, heads, queries, head_dim + rest]`` over keys ``[rows, kv_heads, ...]``."""
        _, heads, queries, width = query.shape
        kv_heads, head_dim = keys.shape[1], width - rest
        biased, latents = scoring.distances is not None, keys.shape[-1] != head_dim
        windowed = biased or scoring.window is not None
        return cls(kv_heads, heads // kv_heads * queries, head_dim, windowed, latents, rest, biased)


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
        self._sizes = {
            "kv_heads": shape.kv_heads,
            "queries": shape.queries_per_kv_head,
            "block_m": self.config.block_m,
            "block_n": self.config.block_n,
        }

    @cached_property
    def needed(self) -> Capacity:
        """The capacity that the schedule needs."""
        return needed_capacity(
            self._node_shapes,
            kv_heads=self.shape.kv_heads,
            queries=self.shape.queries_per_kv_head,
            block_m=self.config.block_m,
        )

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
        kernels, beside = costs_of(self.device).kernels, costs_of(self.device).beside_bandwidth
        numbers = self.forest.rows * self.shape.kv_heads * self.shape.head_dim
        suffix_bytes = _KEY_AND_VALUE_BYTES * numbers * suffix_tokens
        node_seconds = self._node_seconds[programs]
        if programs == self.grid:
            return node_seconds + suffix_bytes / kernels.suffix_bandwidth
        read_beside = node_seconds * min((self.grid - programs) * beside, kernels.suffix_bandwidth)
        in_turn = node_seconds + max(0.0, suffix_bytes - read_beside) / kernels.suffix_bandwidth
        # The third launch reads partials that the second one wrote. Its own launch is not counted, because overlap
        # saves as much: suffixes need not start after the nodes.
        merge = 8 * numbers * self.shape.queries_per_kv_head / kernels.suffix_bandwidth
        return max(in_turn, (self._node_bytes + suffix_bytes) / kernels.bandwidth) + merge

    @cached_property
    def _node_seconds(self) -> dict[int, float]:
        """Predicted seconds of the nodes alone, by number of programs: the grid, or fewer where that may be faster."""
        kernels = costs_of(self.device).kernels
        tile = 4 * self.config.block_m * self.config.block_n * self.shape.head_dim / (kernels.rate / self.grid)
        fewer = range(self.grid * 4 // 5 // BUNDLE * BUNDLE, self.grid // 2, -BUNDLE)
        return {
            programs: max(
                tile * longest_share(self._node_shapes, **self._sizes, programs=programs),
                self._node_bytes / kernels.bandwidth,
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


def differ_by_length(chosen: Config, kept: Config) -> bool:
    """Whether launch parameters differ at most in what depends on context lengths.

    These are key tiles, stages and suffix parameters; results then differ in rounding.
    """
    return kept == replace(chosen, **{name: getattr(kept, name) for name in _BY_LENGTH})


def may_stay(forest: Forest, shape: HeadShape, device: torch.device, chosen: Config, kept: Config) -> bool:
    """Whether a step captured with launch parameters `kept` serves a forest for which `chosen` are chosen."""
    if differ_by_length(chosen, kept):
        return True
    sizes = (shape.kv_heads, shape.queries_per_kv_head)
    return chosen.chain == 1 < kept.chain and chains_may_stay(forest, *sizes, kept, chosen, multiprocessors(device))


def decode_config(
    forest: Forest, shape: HeadShape, device: torch.device, rows: int, *, own_dominate: bool = False
) -> Config:
    """Launch parameters of a layer over a forest, for steps of `rows` rows; arguments as for `LaunchPlan`."""
    from ...kernels.forest_decode.api import choose_config

    keys = shape.kv_heads * sum(
        node.span.length * -(-node.row_count * shape.queries_per_kv_head // QUERY_TILE) for node in forest.nodes
    )
    has_pdl = device.type == "cuda" and compute_capability(device) >= (9, 0)
    config = choose_config(
        max((node.row_count for node in forest.nodes), default=1) * shape.queries_per_kv_head,
        shape.head_dim,
        queries_per_kv_head=shape.queries_per_kv_head,
        rows=rows,
        kv_heads=shape.kv_heads,
        keys=keys // multiprocessors(device),
        windowed=shape.windowed,
        biased=shape.biased,
        own_dominate=own_dominate,
        latents=shape.latents,
        rest=shape.rest,
        overlap=has_pdl,
        shared_memory=shared_memory(device),
        device=device,
    )
    if shape.windowed or shape.latents or shape.rest or own_dominate or not has_pdl:
        return config
    sizes = (shape.kv_heads, shape.queries_per_kv_head, shape.head_dim)
    return choose_chains(forest, *sizes, config, multiprocessors(device))
