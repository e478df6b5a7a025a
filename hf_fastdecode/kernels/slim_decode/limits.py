"""What the slim decode kernel supports."""

from __future__ import annotations

import torch
from torch import Tensor

from ..failures import Kernel, failure
from ..forest_decode.limits import compute_capability
from ..installed import interpreted, triton_is_installed

MAX_HEAD_DIM = 256
MAX_HEADS = 128
MAX_ROWS = 1024


def refusal(query: Tensor, keys: Tensor, coordinates: Tensor) -> str | None:
    """Why `slim_decode` does not support these tensors; None when it does.

    Args:
        query: ``[rows, heads, queries, head_dim]``.
        keys: ``[rows, slots, heads * head_dim]``.
        coordinates: ``[rows, slots, r]``.
    """
    if torch.is_grad_enabled() and any(part.requires_grad for part in (query, keys, coordinates)):
        return "it computes no gradients; call it under torch.no_grad()"
    if not triton_is_installed():
        return "triton is not installed"
    if keys.device.type != "cuda" and not interpreted():
        return f"it runs on CUDA devices, got {keys.device.type!r}"
    if keys.dtype not in (torch.float16, torch.bfloat16) and not interpreted():
        return f"it takes float16 and bfloat16, got {keys.dtype}"  # tensor cores round float32 to tf32
    if keys.device.type == "cuda" and compute_capability(keys.device) < (8, 0):
        return f"it needs compute capability 8.0, got {'.'.join(map(str, compute_capability(keys.device)))}"
    rows, heads, queries, head_dim = query.shape
    if queries != 1:  # averages of all columns for each query do not fit in the registers
        return f"it takes 1 query at once, got {queries}"
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return f"it takes even head_dim up to {MAX_HEAD_DIM}, got {head_dim}"
    if heads > MAX_HEADS:
        return f"it takes up to {MAX_HEADS} heads, got {heads}"
    if rows > MAX_ROWS:
        return f"it takes up to {MAX_ROWS} rows, got {rows}"
    return failure(Kernel.SLIM, keys.device)
