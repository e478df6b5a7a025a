"""V-coordinates in exact arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.key_to_value import solve_key_to_value
from hf_fastdecode.conversion.fit.reference_attention import attention_weights, key_heads, query_heads
from hf_fastdecode.conversion.fit.value_coordinates import noisiest_directions, value_coordinates
from hf_fastdecode.conversion.fit.weights import score_offset

from .layers import IDENTICAL, layer, relative, rope, text
from .references import attention_output, averaged_values, fold_into_output_bias

RANKS = (0, 1, 6, 47, 48)


def noise(size: int) -> Tensor:
    return torch.logspace(-8, -6, size, dtype=torch.float64).flip(0)


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("rank", RANKS)
def test_values_are_exact_at_every_rank(rank: int, biases: bool) -> None:
    weights, X = layer(biases=biases), text(63)
    solved = solve_key_to_value(weights.W_K, weights.W_V)
    directions = noisiest_directions(solved.matrix, noise(48))
    bias = weights.value_bias if biases else torch.zeros(48)
    for offset in (None, torch.linspace(-3, 3, 48)):
        found = value_coordinates(weights, solved, directions[:rank], offset)
        assert found.rank == rank
        values = found.values(found.cached_keys(weights, X), found.coordinates(X))
        assert relative(values, X @ weights.W_V + bias) < IDENTICAL


def test_rank_0_is_the_papers_method_and_full_rank_an_ordinary_cache() -> None:
    weights, X = layer(), text(63)
    solved = solve_key_to_value(weights.W_K, weights.W_V)
    none = value_coordinates(weights, solved, torch.zeros(0, 48))
    assert torch.equal(none.from_keys, solved.matrix)
    assert none.coordinates(X).shape == (63, 0)
    full = value_coordinates(weights, solved, torch.eye(48))
    assert not full.from_keys.any()
    assert relative(full.coordinates(X), X @ weights.W_V) < IDENTICAL


def test_any_directions_of_full_rank_are_exact() -> None:
    weights, X = layer(biases=True), text(63)
    solved = solve_key_to_value(weights.W_K, weights.W_V)
    for directions in (text(6), noisiest_directions(solved.matrix, noise(48))[:6].half()):
        found = value_coordinates(weights, solved, directions)
        values = found.values(found.cached_keys(weights, X), found.coordinates(X))
        assert relative(values, X @ weights.W_V + weights.value_bias) < IDENTICAL


def test_directions_are_the_best_for_the_noise() -> None:
    """Noise makes an error of the sum of the other squared singular values; no other directions make less."""
    weights, spoilt = layer(condition=1e4), noise(48)
    solved = solve_key_to_value(weights.W_K, weights.W_V)

    def error(directions: Tensor) -> float:
        return (spoilt @ value_coordinates(weights, solved, directions).from_keys.square()).sum().item()

    left = torch.linalg.svdvals(spoilt.sqrt()[:, None] * solved.matrix).square()
    best = noisiest_directions(solved.matrix, spoilt)
    for rank in (0, 1, 6, 24):
        assert error(best[:rank]) == pytest.approx(left[rank:].sum().item())
    others = (noisiest_directions(solved.matrix, torch.ones(48)), text(48), torch.eye(48), best.flip(0))
    assert all(error(best[:6]) < error(other[:6]) for other in others)


@pytest.mark.parametrize("rotated", [False, True], ids=["no-rope", "rope"])
@pytest.mark.parametrize("head_dim", [12, 16], ids=["square", "wide"])
def test_attention_from_cached_keys(head_dim: int, rotated: bool) -> None:
    """Keys with an offset and biases, V-coordinates, values averaged before they are made, constants in the output."""
    weights, X = layer(head_dim=head_dim, biases=True), text(63)
    rotation = rope(63, head_dim) if rotated else None
    solved = solve_key_to_value(weights.W_K, weights.W_V)
    width = 4 * head_dim
    directions = noisiest_directions(solved.matrix, noise(width))[:6]
    found = value_coordinates(weights, solved, directions, torch.linspace(-3, 3, width))
    cached, coordinates = found.cached_keys(weights, X), found.coordinates(X)
    offset = score_offset(weights, found.key_offset, rotation)
    assert (offset is None) is not rotated
    keys = key_heads(weights, cached if offset is None else cached + offset, rotation)
    probabilities = attention_weights(query_heads(weights, X, rotation), keys, weights.score_scale)
    averaged = averaged_values(found, probabilities, cached, coordinates)
    folded = (averaged - found.constant) @ weights.W_O + fold_into_output_bias(weights, found.constant)
    assert relative(folded, attention_output(weights, X, rotation=rotation)) < IDENTICAL
