"""One layer in fp64: RoPE and its inverse, biases and QK-norm where keys are cached alone, and cached inputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.cohere.modeling_cohere import apply_rotary_pos_emb as rotate_interleaved
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb as rotate_half

from hf_fastdecode.conversion.fit.attention import (
    Rotation,
    attention_weights,
    key_heads,
    query_heads,
    require_linear_scores,
    value_constant,
)
from hf_fastdecode.conversion.fit.value_coordinates import solve_key_to_value, value_coordinates

from .references import (
    IDENTICAL,
    absorbed_queries,
    attention_output,
    averaged_values,
    fold_into_output_bias,
    inputs_cache_output,
    layer,
    relative,
    rope,
    text,
)

LAYOUTS = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


def keys() -> torch.Tensor:
    return torch.randn(4, 63, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("factor", [1.0, 1.2079], ids=["plain", "yarn"])
@pytest.mark.parametrize("rotary_dim", [2, 6, 12])
@LAYOUTS
def test_unrotation_is_the_inverse(interleaved: bool, rotary_dim: int, factor: float) -> None:
    rotation, x = rope(63, rotary_dim, factor, interleaved=interleaved), keys()
    rotated = rotation.rotate(x)
    for back in (rotation.unrotate(rotated), rotation.rotate(rotation.unrotate(x))):
        # Six roundings to each number of a pair: products, sums, the tables' norm and the quotient, forth and back.
        pairs = 12 * torch.finfo(torch.float64).eps * x.norm(dim=-1, keepdim=True)
        assert ((back - x).abs() <= pairs).all()
    assert torch.equal(rotated[..., rotary_dim:], x[..., rotary_dim:])
    norms = rotated[..., :rotary_dim].norm(dim=-1), factor * x[..., :rotary_dim].norm(dim=-1)
    torch.testing.assert_close(*norms)


@LAYOUTS
def test_rotation_is_that_of_transformers(interleaved: bool) -> None:
    tables, x = rope(63, interleaved=interleaved), keys().float()
    cos, sin = tables.cos.float(), tables.sin.float()
    theirs = rotate_interleaved if interleaved else rotate_half
    expected, _ = theirs(x[None], x[None], cos[None], sin[None])
    assert torch.equal(Rotation(cos, sin, interleaved).rotate(x), expected[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@LAYOUTS
def test_cached_rotated_keys_come_back_within_their_rounding(interleaved: bool, dtype: torch.dtype) -> None:
    """Rotation keeps norms, so un-rotating adds no error to what rounding did to a pair of coordinates."""
    rotation, x = rope(63, 12, 1.2079, interleaved=interleaved), keys()
    rotated = rotation.rotate(x)
    cached = rotated.to(dtype)
    back = rotation.unrotate(cached)
    assert back.dtype == torch.float64

    def pair(y: Tensor) -> Tensor:
        return y.unflatten(-1, (6, 2)).norm(dim=-1) if interleaved else y.unflatten(-1, (2, 6)).norm(dim=-2)

    oracle = pair(cached.double() - rotated) / 1.2079
    assert (pair(back - x) <= oracle + 12 * torch.finfo(torch.float64).eps * pair(x)).all()
    single = Rotation(rotation.cos.float(), rotation.sin.float(), interleaved).unrotate(cached)  # as a kernel would
    assert (pair(single.double() - x) <= oracle + 12 * torch.finfo(torch.float32).eps * pair(x)).all()


def test_a_part_of_the_tokens() -> None:
    rotation, x = rope(63), keys()
    assert torch.equal(rotation.tokens(slice(30, None)).rotate(x[:, 30:]), rotation.rotate(x)[:, 30:])


def test_value_bias_moves_to_the_output() -> None:
    weights, X = layer(biases=True), text(63)
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


def test_keys_are_cached_from_before_qk_norm() -> None:
    """OLMo-2 norms whole projections; what is before the norm is linear in the inputs, and gives the values."""

    def norm(x: Tensor) -> Tensor:
        return x * torch.linspace(0.5, 2, 48) / x.square().mean(-1, keepdim=True).sqrt()

    weights, X, rotation = replace(layer(), query_norm=norm, key_norm=norm), text(63), rope(63)
    solved = solve_key_to_value(weights.W_K, weights.W_V)
    found = value_coordinates(weights, solved, torch.zeros(0, 48), X.mean(0) @ weights.W_K)
    cached = found.cached_keys(weights, X)
    keys = key_heads(weights, cached + found.key_offset, rotation)
    probabilities = attention_weights(query_heads(weights, X, rotation), keys, weights.score_scale)
    out = averaged_values(found, probabilities, cached, found.coordinates(X)) @ weights.W_O
    assert relative(out, attention_output(weights, X, rotation=rotation)) < IDENTICAL


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("head_dim", [8, 12, 48], ids=["e0.7d", "square", "e4d"])
def test_inputs_serve_as_keys_and_values(head_dim: int, biases: bool) -> None:
    weights, X = layer(head_dim=head_dim, biases=biases), text(63)
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


def test_encoder_output_serves_every_cross_attention_layer() -> None:
    encoded = text(63, seed=5)
    for seed in range(3):
        weights, X = layer(biases=True, seed=seed), text(7, seed=seed)
        expected = attention_output(weights, X, encoded, causal=False)
        assert relative(inputs_cache_output(weights, X, encoded, causal=False), expected) < IDENTICAL
