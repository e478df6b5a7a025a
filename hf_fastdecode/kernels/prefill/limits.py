"""What the prefill kernel supports."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..failures import Kernel, failure
from ..forest_decode.limits import MAX_HEAD_DIM, refusal_of_any_shape


def refusal(query: Tensor, keys: Tensor, values: Tensor, stored: Sequence[Tensor] = ()) -> str | None:
    """Why the kernel does not support these tensors, shaped as for `prefill_partial`; None when it does.

    Args:
        stored: Keys and values of contexts.
    """
    if reason := refusal_of_any_shape(keys, query, values, *stored):
        return reason
    others = {(part.dtype, part.device) for part in (query, keys, values, *stored)}
    if len(others) > 1:
        return f"query, keys and values need one dtype and device, got {', '.join(sorted(map(str, others)))}"
    head_dim = keys.shape[-1]
    if values.shape[-1] != head_dim:
        return f"it needs one head_dim for keys and values, got {head_dim} and {values.shape[-1]}"
    if head_dim % 16 or head_dim > MAX_HEAD_DIM:
        return f"it takes head_dim up to {MAX_HEAD_DIM} in multiples of 16, got {head_dim}"
    return failure(Kernel.PREFILL, keys.device)
