"""Attention over cached inputs, for one layer and for cross-attention."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_fastdecode.conversion.fit.weights import require_linear_scores

from .layers import IDENTICAL, layer, relative, rope, text
from .references import absorbed_queries, attention_output, inputs_cache_output


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("head_dim", [8, 12, 48], ids=["e0.7d", "square", "e4d"])
@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_inputs_serve_as_keys_and_values(kv_heads: int, head_dim: int, biases: bool) -> None:
    weights, X = layer(kv_heads=kv_heads, head_dim=head_dim, biases=biases), text(63)
    assert relative(inputs_cache_output(weights, X, X), attention_output(weights, X)) < IDENTICAL
    last = inputs_cache_output(weights, X[-1:], X)  # a decode step: one query, at the last position
    assert relative(last, attention_output(weights, X)[-1:]) < IDENTICAL
    assert absorbed_queries(weights, X).shape == (4, 63, 48)


def test_relative_position_biases_stay() -> None:
    weights, X = replace(layer(), scale=1.0), text(63)  # T5: no scale, a bias per head and distance
    distance = torch.arange(63)[None, :] - torch.arange(63)[:, None]
    bias = torch.linspace(0.1, 1, 4, dtype=torch.float64)[:, None, None] * distance
    expected = attention_output(weights, X, score_bias=bias)
    assert relative(inputs_cache_output(weights, X, X, score_bias=bias), expected) < IDENTICAL
    assert relative(attention_output(weights, X), expected) > 0.01


def test_rope_and_qk_norm_are_refused() -> None:
    with pytest.raises(ValueError, match="RoPE stands between"):
        require_linear_scores(layer(), rope(3))
    normed = replace(layer(), key_norm=lambda x: x)
    with pytest.raises(ValueError, match="QK-norm stands between"):
        inputs_cache_output(normed, text(3), text(3))


@pytest.mark.parametrize("kv_heads", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_encoder_output_serves_every_cross_attention_layer(kv_heads: int) -> None:
    encoded = text(63, seed=5)
    for seed in range(3):
        weights, X = layer(kv_heads=kv_heads, biases=True, seed=seed), text(7, seed=seed)
        expected = attention_output(weights, X, encoded, causal=False)
        assert relative(inputs_cache_output(weights, X, encoded, causal=False), expected) < IDENTICAL
