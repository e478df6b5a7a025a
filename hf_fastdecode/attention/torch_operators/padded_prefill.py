"""Causal attention of a row of fixed length that ends in padding, for prefill passes captured in a CUDA graph.

Shapes and operators depend on the row's fixed length only, so that one capture serves every number of real tokens.
Padding comes last, where causal attention hides it from the tokens before it. Several runs in one row are separated by
a bias, and stored contexts come as a partial, both computed on the device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kv import Scoring
from ..partial import Partial, merge
from .operators import causal_mask, dense_partial, plain_partial, with_sinks


def separating_bias(runs: Tensor, dtype: torch.dtype) -> Tensor:
    """Bias by which a token sees the tokens of its own run up to itself.

    Args:
        runs: ``[tokens]`` int64: number of each token's run; padding has one of its own.

    Returns:
        ``[tokens, tokens]``: 0 where the query (row) sees the key (column), else ``-inf``.
    """
    visible = (runs[:, None] == runs) & causal_mask(len(runs), runs.device)
    return torch.zeros(visible.shape, dtype=dtype, device=runs.device).masked_fill_(~visible, -torch.inf)


def padded_causal_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    scoring: Scoring,
    *,
    bias: Tensor | None = None,
    context: Partial | None = None,
) -> Tensor:
    """Attention of a row's tokens over the tokens up to themselves, merged with that over their stored contexts.

    Args:
        query: ``[heads, tokens, head_dim]``.
        keys: ``[kv_heads, tokens, head_dim]``.
        values: ``[kv_heads, tokens, value_dim]``.
        scoring: Without a window.
        bias: ``[tokens, tokens]`` in the query's dtype, see `separating_bias`; None if the row is a single run.
        context: ``out`` ``[heads, tokens, value_dim]``, if any tokens have a context.

    Returns:
        ``[heads, tokens, value_dim]`` in the query's dtype; undefined for padding.
    """
    kv_heads, softcap = keys.shape[0], scoring.softcap
    grouped = query.unflatten(0, (kv_heads, -1))  # [kv_heads, heads_per_kv_head, tokens, head_dim]
    if softcap is None and scoring.sinks is None and context is None:
        return _out(grouped, keys, values, scoring.scale, bias)
    if softcap is None:
        part = _partial(grouped, keys, values, scoring.scale, bias)
    else:
        visible = causal_mask(query.shape[1], query.device) if bias is None else bias == 0
        part = plain_partial(grouped, keys[:, None], values[:, None], scoring.scale, visible=visible, softcap=softcap)
    own = Partial(part.out.flatten(0, 1), part.lse.flatten(0, 1))
    if context is not None:
        own = merge(own, context)
    if scoring.sinks is not None:
        own = with_sinks(own, scoring.sinks[:, None])
    return own.out.to(query.dtype)


def _out(grouped: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None) -> Tensor:
    """Attention without anything to merge: ``[heads, tokens, value_dim]`` in the query's dtype."""
    heads_per_kv_head = grouped.shape[1]
    if bias is None:
        query = grouped.flatten(0, 1)[None]
        gqa = heads_per_kv_head > 1
        return F.scaled_dot_product_attention(
            query, keys[None], values[None], is_causal=True, scale=scale, enable_gqa=gqa
        )[0]
    keys, values = (_batched(part, heads_per_kv_head) for part in (keys, values))
    out = F.scaled_dot_product_attention(grouped.transpose(0, 1), keys, values, bias, scale=scale)
    return out.transpose(0, 1).flatten(0, 1)


def _partial(grouped: Tensor, keys: Tensor, values: Tensor, scale: float, bias: Tensor | None) -> Partial:
    """The same as a partial, ``out`` ``[kv_heads, heads_per_kv_head, tokens, value_dim]``."""
    query = grouped.transpose(0, 1)
    keys, values = (_batched(part, grouped.shape[1]) for part in (keys, values))
    if bias is None:
        part = dense_partial(query, keys, values, scale, causal=True)
    elif query.is_cuda and not query.shape[-1] % 8 and not values.shape[-1] % 8:
        scores = bias.expand(*query.shape[:2], -1, -1)
        out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, keys, values, scores, True, 0.0, False, scale=scale
        )
        part = Partial(out.float(), lse[..., : query.shape[-2]])  # the operator pads queries to a multiple of 32
    else:
        part = plain_partial(query, keys, values, scale, visible=bias == 0)
    return Partial(part.out.transpose(0, 1), part.lse.transpose(0, 1))


def _batched(stored: Tensor, heads_per_kv_head: int) -> Tensor:
    """Keys or values ``[kv_heads, tokens, width]``, once for each query head of a KV head: a view, not a copy."""
    return stored.expand(heads_per_kv_head, -1, -1, -1)
