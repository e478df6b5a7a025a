"""Casts for custom attention under `torch.autocast`.

Autocast itself casts inputs of PyTorch's public functions, but neither those of ``torch.ops.aten`` operators and of
kernels, nor keys and values that a cache stores.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype of autocast on this device; None where it is off."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type)


def cast(tensor: Tensor) -> Tensor:
    """Cast queries, keys or values as autocast casts inputs of PyTorch's attention: all but float64."""
    dtype = autocast_dtype(tensor.device)
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Turn autocast off, so that operators compute in their inputs' dtype."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)
