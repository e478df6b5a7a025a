"""Errors of memory that ran out."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed; for memory of the CPU torch raises a RuntimeError."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
