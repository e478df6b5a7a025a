"""Values from keys and V-coordinates: in exact arithmetic, and with matrices in half precision."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.attention import (
    AttentionWeights,
    attention_weights,
    key_heads,
    query_heads,
)
from hf_fastdecode.conversion.fit.value_coordinates import (
    StoredValueCoordinates,
    key_statistics,
    noisiest_directions,
    round_columns,
    round_with_feedback,
    rounding_feedback,
    solve_key_to_value,
    store_value_coordinates,
    value_coordinates,
)

from .references import (
    IDENTICAL,
    attention_output,
    averaged_values,
    fold_into_output_bias,
    layer,
    relative,
    rope,
    spectrum,
    text,
)


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
        with pytest.raises(ValueError, match=r"smallest singular value of W_K is .* must be above .* cache"):
            solve_key_to_value(W_K, W_V)
    with pytest.raises(ValueError, match="48 inputs to 40 coordinates"):
        solve_key_to_value(good[:, :40], W_V)


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
        assert len(found.directions) == rank
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
    keys = key_heads(weights, cached + found.key_offset if rotated else cached, rotation)
    probabilities = attention_weights(query_heads(weights, X, rotation), keys, weights.score_scale)
    averaged = averaged_values(found, probabilities, cached, coordinates)
    folded = (averaged - found.constant) @ weights.W_O + fold_into_output_bias(weights, found.constant)
    assert relative(folded, attention_output(weights, X, rotation=rotation)) < IDENTICAL


DTYPES = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])


@DTYPES
@pytest.mark.parametrize("size", [1e-30, 1e-6, 1.0, 1e6, 1e30])
def test_columns_of_any_size_keep_their_bits(size: float, dtype: torch.dtype) -> None:
    matrix = text(63) * size * torch.logspace(-6, 6, 48, dtype=torch.float64)
    matrix[:, 7] = 0
    stored = round_columns(matrix, dtype=dtype)
    assert torch.equal(stored.scales.log2(), stored.scales.log2().round())  # powers of two round nothing
    assert stored.values.double().abs().max() <= 2
    bound = torch.finfo(dtype).eps / 2 * matrix.abs().amax(0)
    assert ((stored.double() - matrix).abs() <= bound).all()
    assert 0 < relative(stored.double(), matrix) <= torch.finfo(dtype).eps / 2
    assert (stored.values.dtype, stored.scales.dtype) == (dtype, torch.float32)


def test_matrices_without_entries_or_of_zeros() -> None:
    assert not round_columns(torch.zeros(3, 2), dtype=torch.float16).double().any()
    for feedback in (None, rounding_feedback(torch.eye(48))):
        assert round_columns(torch.zeros(48, 0), feedback, dtype=torch.float16).values.shape == (48, 0)


@DTYPES
@pytest.mark.parametrize("rows", [1, 63, 300])
def test_uncorrelated_inputs_round_to_nearest(rows: int, dtype: torch.dtype) -> None:
    matrix = text(rows)
    feedback = rounding_feedback(torch.eye(rows) * torch.rand(rows, generator=torch.Generator().manual_seed(0)))
    with_feedback, nearest = (round_columns(matrix, one, dtype=dtype) for one in (feedback, None))
    assert torch.equal(with_feedback.values, nearest.values)


@DTYPES
@pytest.mark.parametrize("rows", [63, 300])
def test_errors_cancel_on_typical_inputs(rows: int, dtype: torch.dtype) -> None:
    mix = spectrum(rows, rows, 1e3, torch.Generator().manual_seed(0))
    matrix, inputs = text(rows), text(1000, rows, seed=2) @ mix
    feedback = rounding_feedback(mix.mT @ mix)
    stored, nearest = (round_columns(matrix, one, dtype=dtype) for one in (feedback, None))
    error, error_of_nearest = (relative(inputs @ one.double(), inputs @ matrix) for one in (stored, nearest))
    # Each row leaves what no row after it can make up for; rounding to nearest leaves the whole error of each.
    left = (feedback.factor.diagonal() ** -2).sum() / mix.square().sum()
    assert error / error_of_nearest == pytest.approx(left.sqrt().item(), rel=0.1)
    assert left.sqrt() < 0.5
    assert relative(stored.double(), matrix) >= relative(nearest.double(), matrix)


def test_degenerate_gram_is_refused() -> None:
    with pytest.raises(ValueError, match="Gram matrix is not positive definite; add a multiple"):
        rounding_feedback(torch.zeros(3, 3))


def test_feedback_is_the_best_answer_to_an_error() -> None:
    """The row that is rounded last makes up for the other as least squares would, without a grid of its own."""
    gram = torch.tensor([[4.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    target = torch.tensor([[0.3], [0.4]], dtype=torch.float64)
    rounded = round_with_feedback(
        target, rounding_feedback(gram), lambda rows, at: torch.where((at == 0)[:, None], rows.round(), rows)
    )
    assert rounded[0] == 0
    assert rounded[1].item() == pytest.approx(0.4 + 0.3 * 1.0 / 1.0)  # gram[1, 0] / gram[1, 1]


def test_products_change_less_than_with_rounding_to_nearest() -> None:
    """There are more rows than are corrected at once."""
    mix = spectrum(300, 300, 1e3, torch.Generator().manual_seed(0))
    feedback, rows = rounding_feedback(mix.mT @ mix), text(300)
    rounded = round_with_feedback(rows, feedback, lambda part, _: part.half().double())
    error, error_of_nearest = (relative(mix @ one, mix @ rows) for one in (rounded, rows.half().double()))
    assert error < error_of_nearest / 2
    assert torch.equal(rounded[feedback.order[0]], rows.half().double()[feedback.order[0]])


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
