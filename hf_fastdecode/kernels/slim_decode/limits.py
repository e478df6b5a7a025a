"""What the slim decode kernel supports."""

from __future__ import annotations

import torch
from torch import Tensor

from ..failures import Kernel, failure
from ..forest_decode.limits import HALF_PRECISION, compute_capability, refusal_of_any_shape
from .scales import EIGHT_BITS

MAX_HEAD_DIM = 256
MAX_HEADS = 128
MAX_ROWS = 1024
FP8_CAPABILITY = (8, 9)


def refusal(query: Tensor, keys: Tensor, coordinates: Tensor) -> str | None:
    """Why `slim_decode` does not support these tensors; None when it does.

    Args:
        query: ``[rows, heads, queries, head_dim]``.
        keys: ``[rows, slots, heads * head_dim]``; of 8 bits without their scales.
        coordinates: ``[rows, slots, r]``.
    """
    if reason := refusal_of_any_shape(keys, query, coordinates, dtypes=(*HALF_PRECISION, *EIGHT_BITS)):
        return reason
    fp8_on_gpu = keys.dtype == torch.float8_e4m3fn and keys.device.type == "cuda"
    if fp8_on_gpu and compute_capability(keys.device) < FP8_CAPABILITY:  # where Triton does not convert it
        least, found = (".".join(map(str, part)) for part in (FP8_CAPABILITY, compute_capability(keys.device)))
        return f"it takes float8_e4m3fn from compute capability {least}, got {found}; int8 runs here"
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
