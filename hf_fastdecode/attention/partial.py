"""Partials: attention over a part of the keys, and their merge.

Attention of a query over a set of keys is a *partial* ``(out, lse)``: the softmax-weighted mean of the values and the
natural logarithm of the softmax denominator. Partials over disjoint key sets merge into the partial over their union,
in any order and grouping, up to rounding (Hydragen, section 3.1; LeanAttention, section 4; Tree Attention, section 5).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Partial(NamedTuple):
    """Attention over a set of keys, with the log-sum-exp by which it merges.

    Attributes:
        out: ``[..., head_dim]``, fp32 (fp64 for fp64 inputs): the weighted mean of the values; 0 for an empty set.
        lse: ``[...]``, the same dtype: natural log of the sum of exponentiated scores; ``-inf`` for an empty set.
    """

    out: Tensor
    lse: Tensor


def empty_partial(
    shape: tuple[int, ...], device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Partial:
    """The identity of `merge`: attention over no keys, ``(0, -inf)``, for an ``out`` of the given shape."""
    out = torch.zeros(shape, device=device, dtype=dtype)
    return Partial(out, torch.full(shape[:-1], -torch.inf, device=device, dtype=dtype))


def unwritten_partial(query: Tensor, value_dim: int) -> Partial:
    """Memory for attention of queries ``[..., head_dim]``, contiguous: ``out`` in their dtype, ``lse`` in fp32."""
    out = torch.empty(*query.shape[:-1], value_dim, dtype=query.dtype, device=query.device)
    return Partial(out, torch.empty(query.shape[:-1], dtype=torch.float32, device=query.device))


def merge(first: Partial, *rest: Partial) -> Partial:
    """Merge partials over disjoint key sets, of broadcastable shapes and one dtype, into the partial over their union.

    ``lse = logaddexp(lse_a, lse_b)`` and ``out = out_a * exp(lse_a - lse) + out_b * exp(lse_b - lse)``, where an
    empty part (``lse = -inf``) has weight 0, and the union of empty sets stays empty. One alone is returned as it is.
    """
    merged = first
    for part in rest:
        # exp(lse_b - lse) is sigmoid(lse_b - lse_a), and the weights add up to 1. Where both sets are empty,
        # -inf - (-inf) would be nan; the clamp makes it -inf, and changes no other weight.
        lse = merged.lse
        weight = torch.sigmoid(part.lse - lse.clamp_min(torch.finfo(lse.dtype).min))
        merged = Partial(torch.lerp(merged.out, part.out, weight.unsqueeze(-1)), torch.logaddexp(lse, part.lse))
    return merged
