"""V-coordinates in half precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.rounding import round_columns
from hf_fastdecode.conversion.fit.stored_coordinates import (
    StoredValueCoordinates,
    key_statistics,
    store_value_coordinates,
)
from hf_fastdecode.conversion.fit.weights import AttentionWeights

from .layers import layer, relative, text


def value_error(weights: AttentionWeights, stored: StoredValueCoordinates, X: Tensor) -> float:
    exact = stored.double()
    cached, coordinates = exact.cached_keys(weights, X).half(), exact.coordinates(X).half()
    bias = torch.zeros(48) if weights.value_bias is None else weights.value_bias
    return relative(exact.values(cached, coordinates), X @ weights.W_V + bias)


@pytest.mark.parametrize("biases", [False, True], ids=["plain", "biases"])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_error_falls_with_rank_to_that_of_caching_values(condition: float, biases: bool) -> None:
    weights = layer(condition=condition, biases=biases)
    seen, unseen = text(400), text(400, seed=2)
    statistics = key_statistics(weights, seen, torch.float16)
    errors = [
        value_error(weights, store_value_coordinates(weights, statistics, r), unseen) for r in (0, 6, 12, 24, 48)
    ]
    assert errors == sorted(errors, reverse=True)
    values = unseen @ weights.W_V
    assert errors[-1] <= 2 * relative(values.half(), values)


def test_a_condition_that_overflows_fp16_is_stored_with_scales() -> None:
    weights = layer(condition=1e7)
    statistics = key_statistics(weights, text(400), torch.float16)
    assert statistics.key_to_value.largest > torch.finfo(torch.float16).max
    for rank in (0, 12):
        stored = store_value_coordinates(weights, statistics, rank)
        assert stored.from_keys.values.dtype == torch.float16
        assert stored.from_keys.values.isfinite().all()


@pytest.mark.parametrize("tokens", [1, 10, 400])
def test_rounding_for_typical_inputs_beats_rounding_to_nearest(tokens: int) -> None:
    """Also after texts too short to show all directions of the inputs."""
    weights, unseen = layer(condition=1e3), text(400, seed=2)
    statistics = key_statistics(weights, text(tokens), torch.float16)
    stored = store_value_coordinates(weights, statistics, 6)
    exact = store_value_coordinates(weights, statistics, 6, matrix_dtype=torch.float32)
    nearest = replace(stored, from_keys=round_columns(exact.from_keys.double(), dtype=torch.float16))
    assert value_error(weights, stored, unseen) < value_error(weights, nearest, unseen)


def test_offset_takes_the_rounding_of_what_all_keys_share() -> None:
    weights, X = layer(condition=1e3), text(400)
    shifted = replace(weights, key_bias=torch.linspace(-100, 100, 48, dtype=torch.float64))
    plain, moved = (key_statistics(one, X, torch.float16) for one in (weights, shifted))
    # The offset is itself a number in fp16, so that what is left of the mean is at most half a unit of it.
    left = (X @ weights.W_K + shifted.key_bias).mean(0) - moved.key_offset
    assert (left.abs() <= 100 * torch.finfo(torch.float16).eps).all()
    assert moved.noise.mean() < 2 * plain.noise.mean()
    whole = X @ weights.W_K + shifted.key_bias
    assert (whole.half().double() - whole).square().mean() > 100 * moved.noise.mean()


def test_keys_beyond_the_range_are_refused() -> None:
    weights = layer()
    wild = replace(weights, key=weights.key * 1e5)
    with pytest.raises(
        ValueError, match=r"keys reach .* must stay below 1\.64e\+04 \(torch\.float16 with headroom of 4"
    ):
        key_statistics(wild, text(63), torch.float16)
    key_statistics(wild, text(63), torch.bfloat16)


def test_ranks_are_bounded() -> None:
    weights = layer()
    statistics = key_statistics(weights, text(63), torch.float16)
    for rank in (-1, 49):
        with pytest.raises(ValueError, match=f"rank must be between 0 and 48, .* got {rank}"):
            store_value_coordinates(weights, statistics, rank)


def test_wide_keys_and_constant_inputs() -> None:
    """e > d, where keys span d directions only, and a text of one token twice."""
    weights, X = layer(head_dim=24), text(1).expand(2, -1)
    statistics = key_statistics(weights, X, torch.float32)
    stored = store_value_coordinates(weights, statistics, 6, matrix_dtype=torch.float32).double()
    unseen = text(63)
    values = stored.values(stored.cached_keys(weights, unseen).float(), stored.coordinates(unseen).float())
    direct = unseen.float() @ weights.W_V.float()
    oracle = unseen @ weights.W_V
    assert relative(values, oracle) < statistics.key_to_value.condition * relative(direct, oracle)
