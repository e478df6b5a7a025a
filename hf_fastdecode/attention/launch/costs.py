"""Measured rates of the kernels, by which a launch plan divides a Hopper GPU between nodes and suffixes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Costs:
    """Rates of one device, in bytes and in floating-point operations per second."""

    bandwidth: float  # of nodes
    suffix_bandwidth: float  # of suffixes after the nodes
    rate: float  # operations over nodes
    beside_bandwidth: float  # of suffixes per multiprocessor, beside the node kernel


_H200_BANDWIDTH, _H200_MULTIPROCESSORS = 4.8e12, 132

# The first three are fitted to results of `python -m benchmarks ops`: 1 to 1024 rows, 2K to 128K tokens. Beside node
# kernels of 72 to 128 programs, each other multiprocessor read 50 to 80 GB/s of suffixes (512 rows of 256 tokens).
_H200 = Costs(bandwidth=4.39e12, suffix_bandwidth=4.15e12, rate=6.55e14, beside_bandwidth=5.0e10)


@lru_cache
def costs_of(device: torch.device) -> Costs:
    """The rates of a CUDA device: measured, or the H200's scaled by the device's properties."""
    properties = torch.cuda.get_device_properties(device)
    if properties.name == "NVIDIA H200":
        return _H200
    return estimated_costs(properties.multi_processor_count, memory_bandwidth(properties))


def estimated_costs(multiprocessors: int, bandwidth: float | None) -> Costs:
    """Estimate the rates of a device that was not measured.

    Args:
        bandwidth: Peak memory bandwidth in bytes per second; scaled by multiprocessors when None.
    """
    size = multiprocessors / _H200_MULTIPROCESSORS
    faster = size if bandwidth is None else bandwidth / _H200_BANDWIDTH
    return Costs(
        _H200.bandwidth * faster,
        _H200.suffix_bandwidth * faster,
        _H200.rate * size,
        _H200.beside_bandwidth * faster / size,
    )


def memory_bandwidth(properties: object) -> float | None:
    """Peak memory bandwidth in bytes per second by clock and bus width; None where torch does not report them."""
    clock, width = getattr(properties, "memory_clock_rate", 0), getattr(properties, "memory_bus_width", 0)
    return 2 * clock * 1e3 * width / 8 if clock and width else None  # kHz, bits, two transfers per clock
