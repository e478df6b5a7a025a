"""Counting of tokens that a model predicts alike with two caches, and emulation of a cache of inputs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hf_fastdecode.conversion.fit.stored_coordinates import rounded
from tools.token_agreement import (
    EXACT,
    Predictions,
    TokensRow,
    before_end,
    compare,
    rounded_inputs,
    rows,
    table,
    values_from_keys,
)

from ...tiny_models import tiny_model


def logits_of(*likely: int, sure: float = 0.9) -> Tensor:
    """Logits of positions whose most likely token, of three, has the probability `sure`."""
    chances = torch.full((len(likely), 3), (1 - sure) / 2)
    chances[range(len(likely)), likely] = sure
    return chances.log()


def test_equal_predictions_agree_throughout() -> None:
    same = Predictions(logits_of(*[0, 1, 2] * 70), [[5, 6], [7]])
    assert compare("same", same, same) == TokensRow("same", (210, 210), 0.0, (3, 3), (2, 2))


def test_forced_tokens_and_their_divergence_are_those_of_every_position() -> None:
    """Also of the last positions, where they are no whole number of parts."""
    exact = Predictions(logits_of(*[0] * 210), [[1]])
    found = Predictions(torch.cat([logits_of(*[0] * 205), logits_of(*[1] * 5)]), [[1]])
    row = compare("five others", found, exact)
    assert row.forced == (210, 205)
    assert row.divergence == pytest.approx(5 / 210 * (0.9 - 0.05) * math.log(0.9 / 0.05), rel=1e-5)


@pytest.mark.parametrize(
    ("found", "tokens_alike", "texts_alike"),
    [
        ([[1, 2, 3, 4], [5, 6]], 6, 2),
        ([[1, 9, 3, 4], [5, 6]], 5, 1),
        ([[1, 2], [5, 6]], 4, 1),  # ends early
        ([[1, 2, 3, 4, 9], [5, 6]], 6, 1),  # goes on
        ([[9, 1, 2, 3, 4], [5, 6]], 2, 1),  # a token more at the beginning
        ([[], []], 0, 0),
    ],
    ids=["same", "one other", "short", "long", "shifted", "empty"],
)
def test_greedy_tokens_are_compared_by_place(found: list[list[int]], tokens_alike: int, texts_alike: int) -> None:
    forced = logits_of(0)
    row = compare("cache", Predictions(forced, found), Predictions(forced, [[1, 2, 3, 4], [5, 6]]))
    assert (row.greedy, row.continuations) == ((6, tokens_alike), (2, texts_alike))


def test_texts_that_are_not_of_the_same_prompts_are_refused() -> None:
    one, two = Predictions(logits_of(0), [[1]]), Predictions(logits_of(0), [[1], [2]])
    with pytest.raises(ValueError, match="zip"):
        compare("cache", one, two)


def test_continuations_stop_before_their_end() -> None:
    assert before_end(torch.tensor([[3, 4, 2, 0], [3, 4, 5, 6], [2, 2, 0, 0]]), 2) == [[3, 4], [3, 4, 5, 6], []]


def test_a_table_has_each_cache_but_the_exact_one() -> None:
    exact = Predictions(logits_of(*[0] * 1000), [[1, 2, 3, 4], [5, 6, 7, 8]])
    worse = Predictions(logits_of(*[1] * 500, *[0] * 500), [[1, 2, 3, 9], [5, 6, 7, 8]])
    made = {EXACT: lambda: exact, "worse": lambda: worse, "never made": pytest.fail}
    assert table(rows(made, ["worse"])).splitlines() == [
        "| cache | same of 1,000 forced tokens | divergence | same of 8 greedy tokens | same of 2 greedy texts |",
        "|---|---|---|---|---|",
        "| worse | 50.0% | 1e+00 | 87.5% | 1 |",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_keys_and_values_are_of_rounded_inputs_and_queries_are_not(dtype: torch.dtype) -> None:
    model = tiny_model("llama-mha")
    attention, inputs = model.model.layers[0].self_attn, torch.randn(1, 5, 64)
    expected = rounded(inputs, dtype, 16).float()
    assert not expected.equal(inputs)
    with rounded_inputs([attention.k_proj, attention.v_proj], dtype, 16):
        for projection, read in (
            (attention.k_proj, expected),
            (attention.v_proj, expected),
            (attention.q_proj, inputs),
        ):
            assert projection(inputs).equal(read @ projection.weight.mT)


def test_rounding_ends_with_the_block_even_if_it_raises() -> None:
    model, ids = tiny_model("llama-mha"), torch.arange(3, 40)[None]
    projections = [layer.self_attn.k_proj for layer in model.model.layers]
    before = model(ids).logits
    with rounded_inputs(projections, torch.int8, 16):
        assert not model(ids).logits.equal(before)
    assert model(ids).logits.equal(before)
    with pytest.raises(ValueError, match="exactly one"), rounded_inputs(projections, torch.int8, 16):
        model()
    assert model(ids).logits.equal(before)


def test_values_follow_from_rounded_keys() -> None:
    """Biases included; without rounding, nothing changes."""
    model = tiny_model("llama-mha", attention_bias=True)
    attention, inputs = model.model.layers[0].self_attn, torch.randn(1, 5, 64)
    with torch.no_grad():
        attention.k_proj.bias.normal_()
        attention.v_proj.bias.normal_()
    keys, values = attention.k_proj(inputs), attention.v_proj(inputs)
    with values_from_keys([attention], torch.float32, 16):
        assert attention.k_proj(inputs).equal(keys)
        torch.testing.assert_close(attention.v_proj(inputs), values, rtol=1e-4, atol=1e-4)
    cached = rounded(keys, torch.bfloat16, 16)
    map_of = torch.linalg.solve(attention.k_proj.weight.double().mT, attention.v_proj.weight.double().mT)
    with values_from_keys([attention], torch.bfloat16, 16):
        assert attention.k_proj(inputs).equal(cached.float())
        expected = (cached - attention.k_proj.bias.double()) @ map_of + attention.v_proj.bias.double()
        torch.testing.assert_close(attention.v_proj(inputs), expected.float())
    assert attention.v_proj(inputs).equal(values)
