"""Properties of a device on which launches depend, free memory, Triton's presence, streams, and arrival counters."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, TypeVar

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


def free_memory(device: torch.device) -> int:
    """Free bytes on a CUDA device, including PyTorch's cached memory; 0 on other devices."""
    if device.type != "cuda":
        return 0
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached  # which asks the driver: up to some milliseconds


@lru_cache
def stream_for(device: torch.device, purpose: str) -> torch.cuda.Stream:
    """The stream for work of one purpose, in order: PyTorch has 32, handed out in turn, and keeps memory for each."""
    return torch.cuda.Stream(device)


MOST_COUNTERS = 1024
"""Tiles whose width is cut into parts; more tiles keep every multiprocessor busy whole."""


def counters(device: torch.device) -> Tensor:
    """Arrival counters of tiles or of programs' parts, ``[MOST_COUNTERS]`` int32 zeros.

    Successive launches on a stream may use the same.
    """
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)


def power_of_two(number: int) -> int:
    """The least power of two that is at least `number`; Triton's function takes as long as a launch."""
    return 1 << (number - 1).bit_length()


Sized = TypeVar("Sized")


def fitted(config: Sized, taken: Callable[[Sized], int], memory: int, *limits: tuple[str, int]) -> Sized:
    """Launch parameters reduced to a device's shared memory: each field in turn, as far as needed.

    Args:
        taken: Bytes that launch parameters take.
        memory: Bytes that a program can have.
        limits: Fields, and how far each is reduced: stages one by one, sizes by half.
    """
    for name, least in limits:
        while taken(config) > memory and (size := getattr(config, name)) > least:
            changed: Any = {name: size - 1 if name == "stages" else size // 2}
            config = replace(config, **changed)  # type: ignore[type-var]
    return config
