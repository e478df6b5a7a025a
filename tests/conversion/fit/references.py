"""Random layers, texts and RoPE; and attention of one layer in fp64 by other formulas than the package's."""

from __future__ import annotations

import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.attention import (
    AttentionWeights,
    Rotation,
    attention_weights,
    bias_or_zero,
    join_heads,
    key_heads,
    query_heads,
    require_linear_scores,
    split_heads,
    weighted_values,
)
from hf_fastdecode.conversion.fit.value_coordinates import ValueCoordinates


def attention_output(
    weights: AttentionWeights,
    inputs: Tensor,
    key_inputs: Tensor | None = None,
    *,
    rotation: Rotation | None = None,
    causal: bool = True,
    score_bias: Tensor | None = None,
) -> Tensor:
    """The layer's output ``[tokens, d_out]``, fp64 (Slim attention, equations 1.1 to 1.3), all biases included.

    Inputs ``[tokens, d]`` are those of the projections, after the layer norm; of cross-attention, keys and values have
    `key_inputs`, ``[keys, key_d]``. For `causal` and `score_bias` see `attention_weights`.
    """
    source = inputs if key_inputs is None else key_inputs
    probabilities = attention_weights(
        query_heads(weights, inputs, rotation),
        key_heads(weights, weights.keys(source), rotation),
        weights.score_scale,
        causal=causal,
        score_bias=score_bias,
    )
    averaged = weighted_values(probabilities, weights.values(source))
    return averaged @ weights.W_O + bias_or_zero(weights.output_bias, weights.W_O)


def absorbed_queries(weights: AttentionWeights, inputs: Tensor) -> Tensor:
    """Queries that are scored against inputs: ``(x W_Q,i + b_Q,i) W_K,i^T``.

    The bias of the keys is left out: it adds a constant per query to the scores (section 5).

    Returns:
        ``[heads, queries, key_d]``, fp64, of inputs ``[queries, d]``.

    Raises:
        ValueError: QK-norm stands between the projections and the scores.
    """
    require_linear_scores(weights, None)
    return query_heads(weights, inputs) @ split_heads(weights.W_K, weights.heads).mT


def inputs_cache_output(
    weights: AttentionWeights, inputs: Tensor, cached: Tensor, *, causal: bool = True, score_bias: Tensor | None = None
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
    averaged = (probabilities @ cached.double()) @ split_heads(weights.W_V, weights.heads)
    value_bias = bias_or_zero(weights.value_bias, weights.W_V)
    return join_heads(averaged) @ weights.W_O + fold_into_output_bias(weights, value_bias)


def fold_into_output_bias(weights: AttentionWeights, constant: Tensor) -> Tensor:
    """The output projection's bias with a constant of the values folded in: ``b_O + constant W_O``.

    The constant is ``[heads * value_dim]``, e.g. the bias of the values, or `value_constant`.

    Returns:
        ``[d_out]``, fp64.
    """
    return constant.double() @ weights.W_O + bias_or_zero(weights.output_bias, weights.W_O)


def averaged_values(
    found: ValueCoordinates, probabilities: Tensor, cached_keys: Tensor, coordinates: Tensor
) -> Tensor:
    """Values averaged per head, ``[queries, e_v]``, without making the values: Slim attention, eq. 2.1, option 2.

    Averaged keys are as sensitive to rounding as keys: they must stay in fp32, or in two halves, up to their
    product with M.

    Args:
        probabilities: ``[heads, queries, keys]``; each row sums to 1.
        cached_keys: ``[keys, e]``.
        coordinates: ``[keys, r]``.
    """
    heads = len(probabilities)
    from_keys, directions = (
        split_heads(matrix, heads) for matrix in (found.from_keys, found.directions)
    )  # [heads, e or r, value_dim]
    out = probabilities @ cached_keys.double() @ from_keys + probabilities @ coordinates.double() @ directions
    return join_heads(out) + found.constant


IDENTICAL = torch.finfo(torch.float32).eps
"""Relative difference of two fp64 results that are the same in exact arithmetic: below what fp32 could tell apart."""


def relative(value: Tensor, oracle: Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return (torch.linalg.norm(value.double() - oracle.double()) / torch.linalg.norm(oracle.double())).item()


def spectrum(rows: int, columns: int, condition: float, generator: torch.Generator) -> Tensor:
    """A matrix with random singular vectors and log-uniform singular values from 1 down to ``1 / condition``."""
    rank = min(rows, columns)
    left, right = (
        torch.linalg.qr(torch.randn(size, rank, generator=generator, dtype=torch.float64))[0]
        for size in (rows, columns)
    )
    return left * torch.logspace(0, -torch.log10(torch.tensor(condition)).item(), rank, dtype=torch.float64) @ right.mT


def layer(
    *,
    d: int = 48,
    heads: int = 4,
    head_dim: int = 12,
    biases: bool = False,
    condition: float = 100.0,
    seed: int = 0,
) -> AttentionWeights:
    """A layer in fp64 whose key projection has the given condition number."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    width = heads * head_dim
    sizes = {"query": width, "key": width, "value": width, "output": d}
    bias = {f"{name}_bias": normal(size) for name, size in sizes.items()}
    return AttentionWeights(
        normal(width, d),
        spectrum(width, d, condition, generator) * d**0.5,
        normal(width, d) / d**0.5,
        normal(d, width) / width**0.5,
        heads,
        **(bias if biases else {}),
    )


def text(tokens: int, d: int = 48, seed: int = 1) -> Tensor:
    """Inputs of a layer."""
    return torch.randn(tokens, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def rope(tokens: int, rotary_dim: int = 12, factor: float = 1.0, *, interleaved: bool = False) -> Rotation:
    """RoPE of tokens 0, 1, ..., with an attention factor on its tables."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(tokens, dtype=torch.float64)[:, None] * frequencies
    angles = angles.repeat_interleave(2, -1) if interleaved else torch.cat([angles, angles], -1)
    return Rotation(angles.cos() * factor, angles.sin() * factor, interleaved)
