"""Biases, and QK-norm, where keys are cached alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.key_to_value import solve_key_to_value
from hf_fastdecode.conversion.fit.reference_attention import attention_weights, key_heads, query_heads
from hf_fastdecode.conversion.fit.value_coordinates import value_coordinates
from hf_fastdecode.conversion.fit.weights import score_offset, value_constant

from .layers import IDENTICAL, layer, relative, rope, text
from .references import attention_output, averaged_values, fold_into_output_bias


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_value_bias_moves_to_the_output(kv_heads: int) -> None:
    weights, X = layer(kv_heads=kv_heads, biases=True), text(63)
    folded = fold_into_output_bias(weights, weights.value_bias)
    moved = replace(weights, value_bias=None, output_bias=folded)
    rotation = rope(63)
    expected = attention_output(weights, X, rotation=rotation)
    assert relative(attention_output(moved, X, rotation=rotation), expected) < IDENTICAL
    assert relative(fold_into_output_bias(replace(weights, output_bias=None), weights.value_bias), folded) > 0.1


def test_whole_keys_leave_minus_their_bias_in_the_values() -> None:
    weights, X = layer(biases=True), text(63)
    W_KV = solve_key_to_value(weights.W_K, weights.W_V).matrix
    constant = value_constant(W_KV, torch.zeros(48), weights.key_bias, weights.value_bias)
    assert relative(constant, weights.value_bias - weights.key_bias @ W_KV) < IDENTICAL
    whole = X @ weights.W_K + weights.key_bias
    assert relative(whole @ W_KV + constant, X @ weights.W_V + weights.value_bias) < IDENTICAL
    without = value_constant(W_KV, weights.key_bias, weights.key_bias, weights.value_bias)
    assert torch.equal(without, weights.value_bias)


def test_key_bias_drops_without_rope_only() -> None:
    weights, X = layer(biases=True), text(63)
    unbiased = replace(weights, key_bias=None)
    assert relative(attention_output(unbiased, X), attention_output(weights, X)) < IDENTICAL
    rotated = attention_output(weights, X, rotation=rope(63))
    assert relative(attention_output(unbiased, X, rotation=rope(63)), rotated) > 0.01
    assert score_offset(weights, weights.key_bias, None) is None
    assert score_offset(weights, weights.key_bias, rope(63)) is weights.key_bias


def test_keys_are_cached_from_before_qk_norm() -> None:
    """OLMo-2 norms whole projections; what is before the norm is linear in the inputs, and gives the values."""

    def norm(x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 2, 48) / x.square().mean(-1, keepdim=True).sqrt()

    weights, X, rotation = replace(layer(), query_norm=norm, key_norm=norm), text(63), rope(63)
    solved = solve_key_to_value(weights.W_K, weights.W_V)
    found = value_coordinates(weights, solved, torch.zeros(0, 48), X.mean(0) @ weights.W_K)
    cached = found.cached_keys(weights, X)
    assert score_offset(weights, found.key_offset, None) is found.key_offset
    keys = key_heads(weights, cached + found.key_offset, rotation)
    probabilities = attention_weights(query_heads(weights, X, rotation), keys, weights.score_scale)
    out = averaged_values(found, probabilities, cached, found.coordinates(X)) @ weights.W_O
    assert relative(out, attention_output(weights, X, rotation=rotation)) < IDENTICAL
