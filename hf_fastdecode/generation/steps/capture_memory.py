"""Device memory of captured steps other than graphs: streams, cuBLAS workspaces, outputs.

cuBLAS keeps one workspace per stream, 32 MiB on Hopper, which PyTorch does not free by itself. All captures of a
device therefore use the same few streams, one capture at a time.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor

from ..._compat import free_cublas_workspaces

CAPTURING = threading.RLock()
"""Held during a capture: all models share a device's capture streams."""

_BRANCHES = 2


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Stream for capturing steps."""
    return torch.cuda.Stream(device)


@cache
def branch_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Streams for parallel branches of a captured step."""
    return tuple(torch.cuda.Stream(device) for _ in range(_BRANCHES))


class _Address:
    """Exposes a tensor's memory by ``__cuda_array_interface__``, without ownership."""

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": None,
            "typestr": f"<i{tensor.itemsize}",  # no typestr for bfloat16
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def unowned(tensor: Tensor) -> Tensor:
    """Non-owning view of a contiguous CUDA tensor, so that the pool can reuse its memory for other captures.

    Its contents are valid from a replay of the graph that writes it until the next replay of any graph in the pool.
    """
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)


def reserve(size: int, device: torch.device) -> None:
    """Grow the pool of the graph under capture by a block of the next power of two of `size` bytes.

    Later captures reuse blocks for outputs up to that size, so captures of growing sizes hold twice the largest output
    rather than the sum of all.
    """
    torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device=device)


def free_memory(device: torch.device) -> int:
    """Free bytes on a CUDA device, including PyTorch's cached memory; 0 on other devices."""
    if device.type != "cuda":
        return 0
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached  # which asks the driver: up to some milliseconds


def used_memory(device: torch.device) -> int:
    """Bytes of PyTorch's tensors on a CUDA device; 0 on other devices."""
    if device.type != "cuda":
        return 0
    of_sizes = torch.cuda.memory_stats_as_nested_dict(device).get("allocated_bytes", {})  # no flat copy of all
    return int(of_sizes.get("all", {}).get("current", 0))


def free_workspaces() -> None:
    """Free cached memory, and cuBLAS workspaces unless a remaining CUDA graph might use them."""
    torch.cuda.empty_cache()  # frees pools of deleted graphs
    if all(segment["segment_pool_id"] == (0, 0) for segment in torch.cuda.memory_snapshot()):
        free_cublas_workspaces()
        torch.cuda.empty_cache()
