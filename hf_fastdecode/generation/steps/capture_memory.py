"""What captured steps hold on a device beside their graphs: streams, cuBLAS workspaces, outputs.

cuBLAS keeps a workspace for each stream that it was called on, 32 MiB on Hopper, and PyTorch frees none of them by
itself. All captures of a device therefore run on the same few streams, one capture at a time.
"""

from __future__ import annotations

import threading
from functools import cache

import torch
from torch import Tensor

CAPTURING = threading.RLock()
"""Held while a step is captured: captures of all models share the streams of a device."""

_BRANCHES = 2


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that steps are captured on."""
    return torch.cuda.Stream(device)


@cache
def branch_streams(device: torch.device) -> tuple[torch.cuda.Stream, ...]:
    """Streams of a captured step's parallel branches."""
    return tuple(torch.cuda.Stream(device) for _ in range(_BRANCHES))


class _Address:
    """What `torch.as_tensor` asks of another library's array."""

    def __init__(self, tensor: Tensor):
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "strides": None,
            "typestr": f"<i{tensor.itemsize}",  # there is none for bfloat16
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def unowned(tensor: Tensor) -> Tensor:
    """A view of a contiguous CUDA tensor that does not keep its memory, so that a pool may give it to other captures.

    What is read through it is valid from a replay of the graph that writes it until the next replay of any graph in
    the pool.
    """
    return torch.as_tensor(_Address(tensor), device=tensor.device).view(tensor.dtype)


def reserve(size: int, device: torch.device) -> None:
    """Let a graph's pool, while it is captured into, grow by blocks of powers of two, at least one of `size` bytes.

    A block of the pool serves outputs that are no larger. If it grew by what each capture needs, captures of ever more
    rows would hold the sum of their outputs; so they hold twice the largest.
    """
    torch.empty(1 << (size - 1).bit_length(), dtype=torch.uint8, device=device)


def free_memory(device: torch.device) -> int:
    """Bytes that can be allocated on a CUDA device, with those that PyTorch has cached; 0 elsewhere."""
    if device.type != "cuda":
        return 0
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def free_workspaces() -> None:
    """Free cached memory, and cuBLAS workspaces where no CUDA graph is left that might hold the address of one."""
    torch.cuda.empty_cache()  # with the pools of graphs that are gone
    if all(segment["segment_pool_id"] == (0, 0) for segment in torch.cuda.memory_snapshot()):
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
