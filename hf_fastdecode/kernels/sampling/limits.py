"""What the sampling kernel supports."""

from __future__ import annotations

import torch

from ..device import interpreted, triton_is_installed
from ..failures import Kernel, failure


def refusal(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why `sample` does not support this dtype and device; None when it does."""
    if not triton_is_installed():
        return "triton is not installed"
    if device.type != "cuda" and not interpreted():
        return f"it runs on CUDA devices, got {device.type!r}"
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"it takes logits in float32 and half precision, got {str(dtype).removeprefix('torch.')}"
    return failure(Kernel.SAMPLING, device)
