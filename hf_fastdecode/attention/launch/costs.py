"""Constants of the cost model: measured on an H200, estimated for other GPUs from their properties."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Candidate:
    """Measured rates of one attention implementation.

    Attributes:
        launch: Seconds of overhead; per launch for the library.
        bandwidth: Bytes per second over nodes.
        suffix_bandwidth: Bytes per second over suffixes.
        rate: Floating-point operations per second over nodes.
    """

    launch: float
    bandwidth: float
    suffix_bandwidth: float
    rate: float = float("inf")


@dataclass(frozen=True)
class Costs:
    """Constants of one device; see `dispatch`.

    Attributes:
        library: PyTorch's fused operators over the forest, the faster of flash and cuDNN over nodes.
        plain: Plain decoding, with a copy of the context per row.
        beside_bandwidth: Bytes per second of suffixes per multiprocessor, beside the node kernel.
        portable_rate: Floating-point operations per second over nodes of the portable (not Hopper) kernel.
        matmul_rate: Floating-point operations per second of large matrix products.
        multiprocessors: Streaming multiprocessors, each with one query tile at a time.
        l2_bytes: Size of the L2 cache.
    """

    kernels: Candidate
    library: Candidate
    plain: Candidate
    beside_bandwidth: float
    portable_rate: float
    matmul_rate: float
    multiprocessors: int
    l2_bytes: float

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
