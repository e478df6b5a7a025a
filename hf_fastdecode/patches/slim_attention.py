"""Attention over a slim cache, in PyTorch's operators."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from ..attention.autocast import no_autocast
from .slim_layers import SlimLayer
from .slim_values import SlimValues


def cache_dtype(model_dtype: torch.dtype, layer: SlimLayer) -> torch.dtype:
    """Of keys and V-coordinates: the layer's own, if it has one.

    Else fp16 for bf16 where their range allows, which has less error in the same bytes, and the model's otherwise.
    """
    if layer.cache_dtype is not None:
        dtype: torch.dtype = getattr(torch, layer.cache_dtype)
        return dtype
    return torch.float16 if model_dtype == torch.bfloat16 and layer.float16 else model_dtype


def slim_attention(
    query: Tensor,
    rotated_keys: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    values: SlimValues,
    mask: Tensor | None,
    *,
    scaling: float,
    dropout: float = 0.0,
    dtype: torch.dtype,
    weights_wanted: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attend.

    Few queries average the keys, and their averages are multiplied by M; many have the values of all tokens made
    first, at the cost of an ordinary value projection, and PyTorch's fused attention.

    Args:
        query: ``[rows, heads, queries, head_dim]`` after RoPE, in fp32.
        rotated_keys: ``[rows, heads, tokens, head_dim]`` after RoPE, in fp32.
        keys: ``[rows, 1, tokens, heads * head_dim]`` as cached; of 8 bits, as read from them.
        coordinates: ``[rows, 1, tokens, r]``, alike.
        values: Of the layer.
        mask: ``[rows, 1, queries, tokens]`` of bool, or to be added to scores; None for causal attention.
        scaling: Factor on the scores.
        dropout: Share of the weights that is dropped.
        dtype: Of fused attention and of the result.
        weights_wanted: Whether to return the attention weights, which fused attention does not have.

    Returns:
        ``[rows, queries, heads * value_dim]``, and the weights ``[rows, heads, queries, tokens]`` in fp32 or None.
    """
    heads, queries, head_dim = query.shape[1:]
    with no_autocast(query.device):
        average_first = queries < head_dim and not dropout  # weights that were dropped no longer sum to 1
        per_head = None
        if not average_first:
            per_head = values.per_token(keys, coordinates).unflatten(-1, (heads, -1)).transpose(1, 2)
            if not weights_wanted:
                out = F.scaled_dot_product_attention(
                    query.to(dtype),
                    rotated_keys.to(dtype),
                    per_head.to(dtype),
                    attn_mask=mask if mask is None or mask.dtype == torch.bool else mask.to(dtype),
                    dropout_p=dropout,
                    is_causal=mask is None and queries > 1,
                    scale=scaling,
                )
                return out.transpose(1, 2).flatten(2), None
        probabilities = F.dropout(_probabilities(query, rotated_keys, mask, scaling), dropout)
        if per_head is None:
            out = values.averaged(probabilities, keys, coordinates)
        else:
            out = probabilities @ per_head
    return out.transpose(1, 2).flatten(2).to(dtype), probabilities if weights_wanted else None


def _probabilities(query: Tensor, keys: Tensor, mask: Tensor | None, scaling: float) -> Tensor:
    scores = query @ keys.mT * scaling
    if mask is None:
        queries, tokens = scores.shape[-2:]
        mask = torch.ones(queries, tokens, dtype=torch.bool, device=scores.device).tril(tokens - queries)
    if mask.dtype == torch.bool:  # a row of padding sees nothing, and must not become NaN
        return scores.masked_fill(~mask, torch.finfo(scores.dtype).min).softmax(-1)
    return (scores + mask).softmax(-1)
