"""Biases of the projections, where keys are cached alone (Slim attention, section 5).

What every token's values have in common leaves the softmax as it is, since attention weights sum to 1, and ends up in
the bias of the output projection. That needs weights which do sum to 1: not with attention sinks, nor where small
weights are dropped without renormalising.

A bias of the keys adds one number to all scores of a query, which the softmax ignores, as long as neither RoPE nor
QK-norm stands between projection and scores. Where one does, it is added back when cached keys are read.
"""

from __future__ import annotations

from torch import Tensor

from .rope import Rotation
from .weights import AttentionWeights, bias_or_zero


def value_constant(from_keys: Tensor, key_offset: Tensor, key_bias: Tensor, value_bias: Tensor) -> Tensor:
    """Constant part of the values, equal for all tokens: ``(c - b_K) M + b_V``, in fp64.

    Keys ``K = X W_K + b_K`` are cached less an offset c. Then ``X W_K = (K - c) + (c - b_K)``, of which only the first
    term is in the cache: ``c = 0`` caches whole keys, ``c = b_K`` keys without their bias.

    Args:
        from_keys: M, ``[e, e_v]``, the matrix from ``X W_K`` to values.
        key_offset: c, ``[e]``.
        key_bias: ``b_K``, ``[e]``.
        value_bias: ``b_V``, ``[e_v]``.

    Returns:
        ``[e_v]``.
    """
    return (key_offset.double() - key_bias.double()) @ from_keys.double() + value_bias.double()


def fold_into_output_bias(weights: AttentionWeights, constant: Tensor) -> Tensor:
    """The output projection's bias that takes in a constant of the values: ``b_O + constant W_O``.

    Args:
        weights: Of the layer; heads of a group share their values, and so their part of the constant.
        constant: ``[kv_heads * value_dim]``, e.g. the bias of the values, or `value_constant`.

    Returns:
        ``[d_out]``, fp64.
    """
    group = weights.heads // weights.kv_heads
    per_head = constant.double().unflatten(0, (weights.kv_heads, -1)).repeat_interleave(group, 0)
    return per_head.flatten() @ weights.W_O + bias_or_zero(weights.output_bias, weights.W_O)


def score_offset(weights: AttentionWeights, key_offset: Tensor, rotation: Rotation | None) -> Tensor | None:
    """Offset to add to cached keys before norm, rotation and scores.

    Args:
        weights: Of the layer.
        key_offset: ``[e]``: keys with their bias were cached less it.
        rotation: RoPE, or None.

    Returns:
        The offset; None where scores that lack it differ by a constant per query, so that it can be left out.
    """
    return None if rotation is None and weights.key_norm is None else key_offset
