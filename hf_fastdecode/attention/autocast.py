"""Attention under `torch.autocast`, which does not reach operators called by name, nor writes into a cache."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def autocast_dtype(device: torch.device) -> torch.dtype | None:
    """The dtype in which autocast has attention computed on this device, or None outside of it."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None


def cast(tensor: Tensor) -> Tensor:
    """Queries, keys or values as PyTorch's attention takes them under autocast: float64 stays, as there."""
    dtype = autocast_dtype(tensor.device)
    return tensor if dtype is None or tensor.dtype == torch.float64 else tensor.to(dtype)


def no_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Within, operators compute in the dtype of what they are given."""
    return nullcontext() if autocast_dtype(device) is None else torch.autocast(device.type, enabled=False)
