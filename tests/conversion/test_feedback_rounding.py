"""Rounding with feedback, of keys above all."""

from __future__ import annotations

import pytest
import torch

from hf_fastdecode.conversion import (
    compensated_key_feedback,
    compensated_keys,
    key_statistics,
    round_with_feedback,
    rounding_feedback,
    solve_key_to_value,
    store_value_coordinates,
)

from .layers import layer, relative, spectrum, text


def test_feedback_is_the_best_answer_to_an_error() -> None:
    """The row that is rounded last makes up for the other as least squares would, without a grid of its own."""
    gram = torch.tensor([[4.0, 1.0], [1.0, 1.0]], dtype=torch.float64)
    target = torch.tensor([[0.3], [0.4]], dtype=torch.float64)
    rounded = round_with_feedback(
        target, rounding_feedback(gram), lambda rows, at: torch.where((at == 0)[:, None], rows.round(), rows)
    )
    assert rounded[0] == 0
    assert rounded[1].item() == pytest.approx(0.4 + 0.3 * 1.0 / 1.0)  # gram[1, 0] / gram[1, 1]


@pytest.mark.parametrize("at_once", [1, 8, 63, 300])
def test_rows_at_once_are_not_compensated_among_each_other(at_once: int) -> None:
    mix = spectrum(300, 300, 1e3, torch.Generator().manual_seed(0))
    feedback, rows = rounding_feedback(mix.mT @ mix), text(300)
    rounded = round_with_feedback(rows, feedback, lambda part, _: part.half().double(), at_once=at_once)
    error, error_of_nearest = (relative(mix @ one, mix @ rows) for one in (rounded, rows.half().double()))
    assert error <= error_of_nearest
    assert torch.equal(rounded[feedback.order[:at_once]], rows.half().double()[feedback.order[:at_once]])
    if at_once == 8:
        assert error < error_of_nearest / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_compensated_keys_keep_values(condition: float, dtype: torch.dtype) -> None:
    weights, X = layer(condition=condition), text(63)
    matrix = solve_key_to_value(weights.W_K, weights.W_V).matrix
    keys = X @ weights.W_K
    rounded = compensated_keys(keys, compensated_key_feedback(matrix), dtype)
    assert rounded.dtype == dtype
    errors = [relative(one.double() @ matrix, X @ weights.W_V) for one in (rounded, keys.to(dtype))]
    assert errors[0] < errors[1] / 2
    assert relative(rounded, keys) < 2 * relative(keys.to(dtype), keys)  # keys themselves move little more
    alone = compensated_keys(keys[5:6], compensated_key_feedback(matrix), dtype)
    assert torch.equal(alone, rounded[5:6])  # one token, as in decoding


def test_keys_that_no_value_follows_from_round_to_nearest() -> None:
    keys = text(63)
    assert torch.equal(compensated_keys(keys, compensated_key_feedback(torch.zeros(48, 48)), torch.half), keys.half())


def test_fp32_matrices_are_needed() -> None:
    """Plans with compensated keys store M in fp32: no rounding of keys makes up for the rounding of M."""
    weights, unseen = layer(condition=1e4), text(400, seed=2)
    statistics = key_statistics(weights, text(400), torch.float16)
    errors = []
    for matrix_dtype in (torch.float16, torch.float32):
        exact = store_value_coordinates(weights, statistics, 0, matrix_dtype=matrix_dtype).double()
        keys = exact.cached_keys(weights, unseen)
        cached = compensated_keys(keys, compensated_key_feedback(exact.from_keys), torch.float16)
        errors.append(relative(exact.values(cached, exact.coordinates(unseen)), unseen @ weights.W_V))
    assert errors[1] < errors[0]
