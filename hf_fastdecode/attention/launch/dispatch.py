"""Chooses the operators of a decode step by a roofline cost model with measured constants.

The candidates are this package's kernels, PyTorch's fused operators over the same forest (the *library*), and plain
decoding, in which every row reads its own copy of its whole context (what stock transformers does). Each part takes
the longer of its bytes at the candidate's bandwidth and its operations at the candidate's rate, plus launches; the
constants are in `costs.py`. Times of nodes and suffixes are added, also where the kernels overlap the two
(`LaunchPlan.programs`) and take less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from ..forest import Forest, Node
from .costs import QUERY_TILE, Costs, costs_of

TYPICAL_SUFFIX = 64
"""Suffix tokens assumed by a choice that is made once for all steps."""

KERNELS, LIBRARY, PLAIN = "kernels", "library", "plain"


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of a layer, from which its bytes and operations follow.

    A `HeadShape` has only those on which schedules depend.

    Attributes:
        heads: Query heads.
        queries: New tokens per row.
        itemsize: Bytes per number.
        window: Sliding window in tokens, if any.
    """

    heads: int
    kv_heads: int
    head_dim: int
    queries: int = 1
    itemsize: int = 2
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Choice:
    """The chosen candidate and the predictions behind it.

    Attributes:
        name: The fastest candidate.
        seconds: Predicted time of a layer's step, by candidate.
    """

    name: str
    seconds: dict[str, float]

    def __str__(self) -> str:
        others = ", ".join(f"{name} {1e6 * time:.0f}" for name, time in self.seconds.items())
        return f"{self.name} (predicted us a layer: {others})"


def predict(forest: Forest, suffix_tokens: float, heads: Heads, costs: Costs) -> dict[str, float]:
    """Predicted seconds of one layer's attention in a decode step, by candidate."""
    per_token = heads.bytes_per_token
    flops_per_key = 4 * heads.heads * heads.head_dim * heads.queries  # of one row
    window = float("inf") if heads.window is None else heads.window
    seen = [min(length, max(0.0, window - suffix_tokens)) for length in forest.context_lengths]  # of a row's nodes
    node_tokens = list(_tokens_read(forest, seen))
    node_bytes = [
        tokens * per_token * _passes(tokens, node, heads, costs)
        for tokens, node in zip(node_tokens, forest.nodes, strict=True)
    ]
    node_flops = [
        tokens * node.row_count * flops_per_key for tokens, node in zip(node_tokens, forest.nodes, strict=True)
    ]
    suffix_bytes = forest.rows * min(suffix_tokens, window) * per_token
    plain_bytes = sum(seen) * per_token + suffix_bytes
    batches = sum(len(level) for level in forest.batches)
    kernels, library, plain = costs.kernels, costs.library, costs.plain
    rate = kernels.rate if heads.window is None else costs.portable_rate
    by_library = (
        max(size / library.bandwidth, work / library.rate) for size, work in zip(node_bytes, node_flops, strict=True)
    )
    return {
        KERNELS: kernels.launch
        + max(sum(node_bytes) / kernels.bandwidth, sum(node_flops) / rate)
        + suffix_bytes / kernels.suffix_bandwidth,
        LIBRARY: library.launch * (1 + 2 * batches) + sum(by_library) + suffix_bytes / library.suffix_bandwidth,
        PLAIN: plain.launch + plain_bytes / plain.bandwidth,
    }


def _passes(tokens: float, node: Node, heads: Heads, costs: Costs) -> int:
    """How often these tokens of a node are read from memory.

    As many query tiles as multiprocessors read a KV head's tokens together; further tiles hit the L2 cache if it
    holds them.
    """
    if tokens * heads.bytes_per_token / heads.kv_heads <= costs.l2_bytes:
        return 1
    packed = node.row_count * heads.heads // heads.kv_heads * heads.queries
    return math.ceil(packed / QUERY_TILE / costs.multiprocessors)


def _tokens_read(forest: Forest, seen: Sequence[float]) -> Iterator[float]:
    """Tokens of each node that any of its rows sees, where row ``i`` sees the last ``seen[i]`` of its path."""
    for node in forest.nodes:
        rows = range(node.row_start, node.row_stop)
        tokens_below = (
            forest.context_lengths[row] - forest.starts[node.depth][row] - node.span.length for row in rows
        )
        most = max(seen[row] - below for row, below in zip(rows, tokens_below, strict=True))
        yield min(max(0.0, most), node.span.length)


def choose(
    forest: Forest,
    suffix_tokens: float,
    heads: Heads,
    device: torch.device,
    among: tuple[str, ...] = (KERNELS, LIBRARY, PLAIN),
) -> Choice:
    """The fastest candidate of `among` on a CUDA device; other arguments as for `predict`."""
    predicted = predict(forest, suffix_tokens, heads, costs_of(device))
    seconds = {name: predicted[name] for name in among}
    return Choice(min(among, key=lambda name: seconds[name]), seconds)


class Choices:
    """Choices between kernels and PyTorch's operators over the current forest, by `Heads` and device."""

    def __init__(self) -> None:
        self._forest: Forest | None = None
        self._known: dict[tuple[Heads, torch.device], Choice] = {}

    def of(self, forest: Forest, heads: Heads, device: torch.device) -> Choice:
        """The choice for a layer; the same object for the same forest and arguments."""
        if self._forest is not forest:
            self._forest, self._known = forest, {}
        if (heads, device) not in self._known:
            # PyTorch's operators compute a window's masked edge by further products, which the model does not include.
            among = (KERNELS, LIBRARY) if heads.window is None else (KERNELS,)
            self._known[heads, device] = choose(forest, TYPICAL_SUFFIX, heads, device, among=among)
        return self._known[heads, device]
