"""What kernels know of a device: Triton, its properties, and counters of programs that have arrived."""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache
def triton_is_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreted() -> bool:
    """Whether Triton interprets kernels (``TRITON_INTERPRET=1``), which also works on a CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1" and triton_is_installed()


@lru_cache
def compute_capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device."""
    return torch.cuda.get_device_capability(device)


def overlap_options(device: torch.device) -> dict[str, bool]:
    """Launch options of kernels that may start while the previous one ends (programmatic dependent launch, PDL)."""
    overlaps = device.type == "cuda" and not interpreted() and compute_capability(device) >= (9, 0)
    return {"PDL": True, "launch_pdl": True} if overlaps else {"PDL": False}


@lru_cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory per program on a CUDA device; an H200's where Triton interprets."""
    if device.type != "cuda":
        return 227 * 1024
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block))


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of a CUDA device; 4 where Triton interprets."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


MOST_COUNTERS = 1024
"""Tiles whose width is cut into parts; more tiles keep every multiprocessor busy whole."""


def counters(device: torch.device) -> Tensor:
    """Arrival counters of tiles or of programs' parts, ``[MOST_COUNTERS]`` int32 zeros.

    Successive launches on a stream may use the same.
    """
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)
