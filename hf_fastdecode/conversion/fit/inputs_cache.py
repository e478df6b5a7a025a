"""Caches of inputs instead of keys and values, for one layer and for cross-attention (Slim attention, 6 and 7).

Without RoPE, scores are bilinear in the inputs, ``(x_n W_Q,i + b_Q,i) W_K,i^T X^T``: the key's projection moves to the
query, once per step, and the value's projection to the average over inputs (section 6, option 2, and figure 4). Heads
of a group share ``W_K,i`` and ``W_V,i``, so grouped-query and multi-query layers are served too.

Cross-attention (section 7): option 1 caches keys of the encoder's output E per layer, which is `value_coordinates`
with E as the inputs of keys; option 2 caches E once for all layers, which is `inputs_cache_output` of E.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from .reference_attention import attention_weights, join_heads, query_heads, split_heads
from .weights import AttentionWeights, bias_or_zero, fold_into_output_bias, require_linear_scores

CrossCache = Literal["kv", "k", "encoder"]
"""Keys and values per layer; keys per layer (option 1); the encoder's output (option 2)."""


def absorbed_queries(weights: AttentionWeights, inputs: Tensor) -> Tensor:
    """Queries that are scored against inputs: ``(x W_Q,i + b_Q,i) W_K,i^T``.

    The bias of the keys is left out: it adds a constant per query to the scores (section 5).

    Returns:
        ``[heads, queries, key_d]``, fp64, of inputs ``[queries, d]``.

    Raises:
        ValueError: QK-norm stands between the projections and the scores.
    """
    require_linear_scores(weights, None)
    return query_heads(weights, inputs) @ _per_query_head(weights, weights.W_K).mT


def inputs_cache_output(
    weights: AttentionWeights,
    inputs: Tensor,
    cached: Tensor,
    *,
    causal: bool = True,
    score_bias: Tensor | None = None,
) -> Tensor:
    """The layer's output ``[queries, d_out]``, fp64, from cached inputs; it equals `attention_output`.

    Of inputs ``[queries, d]`` and what is cached, ``[keys, key_d]``: the layer's inputs, or the encoder's output for
    cross-attention. Relative position biases (`score_bias`) do not depend on keys, and stay.

    Raises:
        ValueError: QK-norm stands between the projections and the scores.
    """
    absorbed = absorbed_queries(weights, inputs)  # [heads, queries, key_d]
    probabilities = attention_weights(
        absorbed, cached.double()[None], weights.score_scale, causal=causal, score_bias=score_bias
    )
    averaged = (probabilities @ cached.double()) @ _per_query_head(weights, weights.W_V)
    value_bias = bias_or_zero(weights.value_bias, weights.W_V)
    return join_heads(averaged) @ weights.W_O + fold_into_output_bias(weights, value_bias)


def _per_query_head(weights: AttentionWeights, matrix: Tensor) -> Tensor:
    """``[key_d, kv_heads * dim]`` to ``[heads, key_d, dim]``."""
    return split_heads(matrix, weights.kv_heads).repeat_interleave(weights.heads // weights.kv_heads, 0)


def cross_cache_width(layers: Sequence[AttentionWeights], cache: CrossCache) -> int:
    """Numbers cached per token of the encoder's output, over all decoder layers (the table of section 7)."""
    if cache == "encoder":
        return layers[0].key.shape[1]
    values = sum(layer.value.shape[0] for layer in layers) if cache == "kv" else 0
    return sum(layer.key.shape[0] for layer in layers) + values
