"""Chooses the operators of a decode step by a roofline cost model with measured constants.

The candidates are this package's kernels, PyTorch's fused operators over the same forest (the *library*), and plain
decoding, in which every row reads its own copy of its whole context (what stock transformers does). Each part takes
the longer of its bytes at the candidate's bandwidth and its operations at the candidate's rate, plus launches; the
constants are measured on an H200, and estimated for other GPUs from their properties. Times of nodes and suffixes are
added, also where the kernels overlap the two (`LaunchPlan.programs`) and take less.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch

from ..forest import Forest, Node

TYPICAL_SUFFIX = 64
"""Suffix tokens assumed by a choice that is made once for all steps."""

KERNELS, LIBRARY, PLAIN = "kernels", "library", "plain"


@dataclass(frozen=True)
class Heads:
    """Head counts and sizes of a layer, from which its bytes and operations follow.

    A `HeadShape` has only those on which schedules depend.
    """

    heads: int  # query heads
    kv_heads: int
    head_dim: int
    queries: int = 1  # new tokens per row
    itemsize: int = 2  # bytes per element
    window: int | None = None  # sliding window in tokens, if any

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values."""
        return 2 * self.kv_heads * self.head_dim * self.itemsize


@dataclass(frozen=True)
class Choice:
    """The chosen candidate and the predictions for all."""

    name: str  # the fastest candidate
    seconds: dict[str, float]  # predicted time of a layer's step, by candidate

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


@dataclass
class Choices:
    """Choices between kernels and PyTorch's operators over the current forest, by `Heads` and device."""

    forest: Forest | None = None
    known: dict[tuple[Heads, torch.device], Choice] = field(default_factory=dict)

    def of(self, forest: Forest, heads: Heads, device: torch.device) -> Choice:
        """The choice for a layer; the same object for the same forest and arguments."""
        if self.forest is not forest:
            self.forest, self.known = forest, {}
        if (heads, device) not in self.known:
            # PyTorch's operators compute a window's masked edge by further products, which the model does not include.
            among = (KERNELS, LIBRARY) if heads.window is None else (KERNELS,)
            self.known[heads, device] = choose(forest, TYPICAL_SUFFIX, heads, device, among=among)
        return self.known[heads, device]


@dataclass(frozen=True)
class Candidate:
    """Measured rates of one attention implementation."""

    launch: float  # seconds of overhead; per launch for the library
    bandwidth: float  # bytes per second over nodes
    suffix_bandwidth: float  # bytes per second over suffixes
    rate: float = float("inf")  # floating-point operations per second over nodes


@dataclass(frozen=True)
class Costs:
    """Constants of one device; see `dispatch`."""

    kernels: Candidate
    library: Candidate  # PyTorch's fused operators over the forest, the faster of flash and cuDNN over nodes
    plain: Candidate  # plain decoding, with a copy of the context per row
    beside_bandwidth: float  # bytes per second of suffixes per multiprocessor, beside the node kernel
    portable_rate: float  # floating-point operations per second over nodes of the portable (not Hopper) kernel
    matmul_rate: float  # floating-point operations per second of large matrix products
    multiprocessors: int  # streaming multiprocessors, each with one query tile at a time
    l2_bytes: float  # size of the L2 cache

    def scaled(self, bandwidth_factor: float, rate_factor: float) -> Costs:
        """These constants for a device of other memory bandwidth and arithmetic rate."""
        kernels, library, plain = (
            replace(
                candidate,
                bandwidth=candidate.bandwidth * bandwidth_factor,
                suffix_bandwidth=candidate.suffix_bandwidth * bandwidth_factor,
                rate=candidate.rate * rate_factor,
            )
            for candidate in (self.kernels, self.library, self.plain)
        )
        return replace(
            self,
            kernels=kernels,
            library=library,
            plain=plain,
            beside_bandwidth=self.beside_bandwidth * bandwidth_factor,
            portable_rate=self.portable_rate * rate_factor,
            matmul_rate=self.matmul_rate * rate_factor,
        )


QUERY_TILE = 128
"""Packed queries that read a node's keys at once, in all candidates."""

# Reference of the estimate for other devices.
_H200_BANDWIDTH, _H200_MULTIPROCESSORS, _HOPPER = 4.8e12, 132, 9

# `python -m tools.calibrate` fits the three candidates to results of `python -m benchmarks ops`: 1 to 1024 rows, 2K to
# 128K tokens. The other constants are not fitted:
# - beside_bandwidth: beside node kernels of 72 to 128 programs, each other multiprocessor read 50 to 80 GB/s of
#   suffixes (512 rows of 256 tokens); the lowest.
# - portable_rate: slope of the portable kernel's time against the context length, from an earlier measurement.
# - matmul_rate: the lowest ceiling of matrix products in these results.
_H200 = Costs(
    kernels=Candidate(launch=9.73e-6, bandwidth=4.39e12, suffix_bandwidth=4.15e12, rate=6.55e14),
    library=Candidate(launch=1.31e-5, bandwidth=4.46e12, suffix_bandwidth=2.25e12, rate=3.95e14),
    plain=Candidate(launch=1.23e-5, bandwidth=2.98e12, suffix_bandwidth=2.98e12),
    beside_bandwidth=5.0e10,
    portable_rate=4.9e14,
    matmul_rate=7.0e14,
    multiprocessors=_H200_MULTIPROCESSORS,
    l2_bytes=50 * 2**20,
)
_MEASURED = {"NVIDIA H200": _H200}


@lru_cache
def costs_of(device: torch.device) -> Costs:
    """The constants of a CUDA device: measured, or the H200's scaled by the device's properties."""
    properties = torch.cuda.get_device_properties(device)
    if properties.name in _MEASURED:
        return _MEASURED[properties.name]
    return estimated_costs(
        properties.multi_processor_count,
        memory_bandwidth(properties),
        properties.major,
        l2_bytes=getattr(properties, "L2_cache_size", None),
    )


def prefill_rate(device: torch.device) -> float:
    """Floating-point operations per second of large matrix products, an upper bound for prefill."""
    return costs_of(device).matmul_rate


def estimated_costs(
    multiprocessors: int, bandwidth: float | None, capability: int = _HOPPER, *, l2_bytes: float | None = None
) -> Costs:
    """Estimate the constants of a device that was not measured.

    Args:
        bandwidth: Peak memory bandwidth in bytes per second; scaled by multiprocessors when None.
        capability: Major compute capability.
        l2_bytes: Size of the L2 cache; an H200's when None.
    """
    size = multiprocessors / _H200_MULTIPROCESSORS
    # Before Hopper, tensor cores compute half as much per cycle; the Hopper kernel runs on Hopper only.
    rate = size if capability >= _HOPPER else size / 2
    costs = _H200.scaled(size if bandwidth is None else bandwidth / _H200_BANDWIDTH, rate)
    costs = replace(
        costs,
        beside_bandwidth=costs.beside_bandwidth / size,
        multiprocessors=multiprocessors,
        l2_bytes=l2_bytes or costs.l2_bytes,
    )
    if capability == _HOPPER:
        return costs
    return replace(costs, kernels=replace(costs.kernels, rate=costs.portable_rate))


def memory_bandwidth(properties: object) -> float | None:
    """Peak memory bandwidth in bytes per second by clock and bus width; None where torch does not report them."""
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 if clock and width else None  # kHz, bits, two transfers per clock
