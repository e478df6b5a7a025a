"""Reference (the specification): attention of one layer in fp64 (Slim attention, equations 1.1 to 1.3).

Slim caches are measured against it. Scores are materialised as ``[heads, queries, keys]``, for calibration texts of
about a thousand tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .rope import Rotation
from .weights import AttentionWeights, bias_or_zero


def split_heads(x: Tensor, heads: int) -> Tensor:
    """``[tokens, heads * head_dim]`` to ``[heads, tokens, head_dim]``."""
    return x.unflatten(-1, (heads, -1)).transpose(0, 1)


def join_heads(x: Tensor) -> Tensor:
    """``[heads, tokens, head_dim]`` to ``[tokens, heads * head_dim]``."""
    return x.transpose(0, 1).flatten(1)


def query_heads(weights: AttentionWeights, inputs: Tensor, rotation: Rotation | None = None) -> Tensor:
    """Queries as scores use them, after bias, QK-norm and RoPE: ``[heads, tokens, head_dim]``, fp64."""
    projected = inputs.double() @ weights.W_Q + bias_or_zero(weights.query_bias, weights.W_Q)
    normed = projected if weights.query_norm is None else weights.query_norm(projected)
    heads = split_heads(normed, weights.heads)
    return heads if rotation is None else rotation.rotate(heads)


def key_heads(weights: AttentionWeights, keys: Tensor, rotation: Rotation | None = None) -> Tensor:
    """Keys ``[tokens, e]`` as scores use them, after QK-norm and RoPE: ``[kv_heads, tokens, head_dim]``."""
    heads = split_heads(keys if weights.key_norm is None else weights.key_norm(keys), weights.kv_heads)
    return heads if rotation is None else rotation.rotate(heads)


def attention_weights(
    query: Tensor, key: Tensor, scale: float, *, causal: bool = True, score_bias: Tensor | None = None
) -> Tensor:
    """The softmax of the scores: ``[heads, queries, keys]``; each row sums to 1.

    Args:
        query: ``[heads, queries, head_dim]``; query head ``i`` uses key head ``i // (heads / kv_heads)``.
        key: ``[kv_heads, keys, head_dim]``.
        scale: Factor on the scores.
        causal: Whether query j of n sees keys up to its own position, the last query the last key.
        score_bias: Added to the scaled scores, broadcast to ``[heads, queries, keys]`` (ALiBi, T5's position bias).
    """
    scores = query @ key.repeat_interleave(len(query) // len(key), 0).mT * scale
    if score_bias is not None:
        scores = scores + score_bias
    if causal:
        queries, keys = scores.shape[-2:]
        future = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu(keys - queries + 1)
        scores = scores.masked_fill(future, -torch.inf)
    return torch.softmax(scores, -1)


def weighted_values(probabilities: Tensor, values: Tensor, kv_heads: int) -> Tensor:
    """Average values ``[keys, kv_heads * value_dim]`` by probabilities ``[heads, queries, keys]``, for each query."""
    per_head = split_heads(values, kv_heads).repeat_interleave(len(probabilities) // kv_heads, 0)
    return join_heads(probabilities @ per_head)
