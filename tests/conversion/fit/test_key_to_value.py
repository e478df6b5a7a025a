"""The matrix from keys to values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from hf_fastdecode.conversion.fit.key_to_value import SingularKeysError, solve_key_to_value
from hf_fastdecode.conversion.fit.weights import require_multi_head

from .layers import IDENTICAL, layer, relative, spectrum, text


@pytest.mark.parametrize("head_dim", [12, 17, 48], ids=["square", "e1.4d", "e4d"])
def test_values_follow_from_keys(head_dim: int) -> None:
    weights, X = layer(head_dim=head_dim), text(63)
    solved = solve_key_to_value(weights.W_K, weights.W_V)
    assert solved.matrix.shape == (4 * head_dim, 4 * head_dim)
    assert relative(X @ weights.W_K @ solved.matrix, X @ weights.W_V) < IDENTICAL
    assert relative(torch.linalg.pinv(weights.W_K) @ weights.W_V, solved.matrix) < IDENTICAL  # of least norm


def test_solve_is_stabler_than_the_papers_formula() -> None:
    """Its right inverse through ``W_K W_K^T`` squares the condition number."""
    weights = layer(condition=1e7, head_dim=17)
    W_K, W_V = weights.W_K, weights.W_V
    paper = W_K.mT @ torch.linalg.inv(W_K @ W_K.mT) @ W_V
    solved = solve_key_to_value(W_K, W_V)
    assert relative(W_K @ solved.matrix, W_V) < IDENTICAL < relative(W_K @ paper, W_V)


def test_spectrum_and_range_are_told() -> None:
    solved = solve_key_to_value(layer(condition=1e4).W_K, layer(condition=1e4).W_V)
    assert solved.condition == pytest.approx(1e4)
    assert solved.singular_values.diff().le(0).all()
    assert solved.largest == solved.matrix.abs().max()


def test_noise_chooses_among_right_inverses() -> None:
    weights, X = layer(head_dim=24), text(63)
    noise = torch.logspace(-8, 0, 96, dtype=torch.float64)
    noise[3] = 0  # a coordinate without error
    quiet = solve_key_to_value(weights.W_K, weights.W_V, noise).matrix
    least = solve_key_to_value(weights.W_K, weights.W_V).matrix
    assert relative(X @ weights.W_K @ quiet, X @ weights.W_V) < IDENTICAL
    assert (noise @ quiet.square()).sum() < (noise @ least.square()).sum() / 10
    square = layer()
    same = [solve_key_to_value(square.W_K, square.W_V, one).matrix for one in (noise[:48], None)]
    assert relative(*same) < IDENTICAL


def test_singular_keys_are_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    good, W_V = spectrum(48, 48, 10, generator), text(48)
    dead = good.clone()
    dead[:, 5] = dead[:, 4]
    for W_K in (dead, torch.zeros(48, 48), spectrum(48, 48, 1e15, generator)):
        with pytest.raises(SingularKeysError, match=r"smallest singular value of W_K is .* must be above .* cache"):
            solve_key_to_value(W_K, W_V)
    with pytest.raises(SingularKeysError, match="48 inputs to 40 coordinates"):
        solve_key_to_value(good[:, :40], W_V)
    with pytest.raises(ValueError, match="inf or nan"):
        solve_key_to_value(good * torch.nan, W_V)


def test_grouped_queries_are_refused_with_both_numbers() -> None:
    require_multi_head(layer())
    with pytest.raises(ValueError, match="num_key_value_heads == num_attention_heads, got 2 != 4"):
        require_multi_head(layer(kv_heads=2))
    with pytest.raises(ValueError, match="keys of 32 coordinates do not determine inputs of 48"):
        require_multi_head(layer(head_dim=8))


def test_weights_are_checked() -> None:
    weights = layer()
    with pytest.raises(ValueError, match="kv_heads must divide heads, got 3 and 4"):
        replace(weights, kv_heads=3)
    with pytest.raises(ValueError, match="the key projection has 47 coordinates"):
        replace(weights, key=weights.key[:47])
    with pytest.raises(ValueError, match=r"one width, got 48 / 4 and 24 / 4; weights are \[out, in\]"):
        replace(weights, key=weights.key[:24])
    with pytest.raises(ValueError, match="value and output must have one width"):
        replace(weights, output=weights.output[:, :24])
    with pytest.raises(ValueError, match="key and value must read one input, got 40 and 48"):
        replace(weights, key=weights.key[:, :40])
