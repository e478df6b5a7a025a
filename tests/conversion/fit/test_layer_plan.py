"""Plans per layer: what is measured, chosen and refused, on random layers and on the embedded model."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_fastdecode.assets import embedded_tasks, few_shot_prompt, load_embedded
from hf_fastdecode.conversion.fit.attention import AttentionInputs, AttentionWeights, Rotation
from hf_fastdecode.conversion.fit.layer_plan import CacheError, CacheErrors, LayerPlan, fit_layer
from tools.unfitted_keys import ErrorsOfPaper

from .references import IDENTICAL, attention_output, layer, relative, rope, spectrum, text


def plan_layer(
    weights: AttentionWeights,
    inputs: Tensor,
    encoded: Tensor | None = None,
    *,
    rotation: Rotation | None = None,
    score_bias: Tensor | None = None,
    **options: Any,
) -> LayerPlan:
    """The plan alone."""
    return fit_layer(weights, AttentionInputs(inputs, encoded, rotation, score_bias), **options)[0]


def caches(plan: LayerPlan) -> set[tuple[str, int]]:
    return {(candidate.plan, candidate.rank) for candidate in plan.candidates}


def test_the_smallest_that_is_accurate_enough_is_chosen() -> None:
    for condition in (1.0, 1e3, 1e6):
        for tolerance in (1.0, 2.0, 1e9):
            plan = plan_layer(layer(condition=condition), text(126), rotation=rope(126), tolerance=tolerance)
            enough = [one for one in plan.candidates if one.output_error <= tolerance * plan.ordinary.output_error]
            assert plan.chosen in enough
            assert plan.chosen.bytes_per_token == min(one.bytes_per_token for one in enough)
    assert plan_layer(layer(condition=1.0), text(126), rotation=rope(126)).chosen.plan == "k"
    assert plan.chosen.plan == "k"  # the last: anything goes


def test_candidates_and_their_bytes() -> None:
    plan = plan_layer(layer(), text(126))
    ranks = (1, 3, 6, 12, 18, 24)
    assert caches(plan) == {("kv", 0), ("x", 0), ("k", 0), *(("k+r", rank) for rank in ranks)}
    sizes = {(one.plan, one.rank): one.bytes_per_token for one in plan.candidates}
    assert sizes[("kv", 0)] == 192
    assert sizes[("x", 0)] == sizes[("k", 0)] == 96
    assert [sizes[("k+r", rank)] for rank in ranks] == [98, 102, 108, 120, 132, 144]
    assert (plan.cache_dtype, plan.model_dtype) == ("float16", "bfloat16")
    assert plan.condition == pytest.approx(100)
    assert len(plan.singular_values) == 48
    assert plan.largest_key_to_value is not None
    wide = plan_layer(layer(head_dim=48), text(126), model_dtype=torch.float32)
    assert wide.chosen.plan == "x"
    assert (wide.cache_dtype, wide.chosen.bytes_per_token, wide.ordinary.bytes_per_token) == ("float32", 192, 1536)


def test_plans_survive_json() -> None:
    for dtype in (None, torch.int8):
        plan = plan_layer(layer(), text(126), rotation=rope(126), cache_dtype=dtype)
        plain = json.loads(json.dumps(plan.to_dict(), allow_nan=False))
        assert plain == plan.to_dict()
        assert plain["chosen"] in plain["candidates"]
        assert [CacheError(**one) for one in plain["candidates"]] == list(plan.candidates)


@pytest.mark.parametrize("tolerance", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("condition", [1e1, 1e4])
def test_caches_in_8_bits_are_held_to_int8_keys_and_values(
    dtype: torch.dtype, condition: float, tolerance: float
) -> None:
    arguments = {"rotation": rope(252), "tolerance": tolerance}
    plan = plan_layer(layer(condition=condition), text(252), cache_dtype=dtype, **arguments)
    judge, before = plan.ordinary_int8, plan_layer(layer(condition=condition), text(252), **arguments)
    assert judge is not None
    assert (judge.dtype, judge.bytes_per_token) == ("int8", 2 * (48 + 4 * 2))
    assert judge not in plan.candidates
    eight = [one for one in plan.candidates if one.dtype == str(dtype).removeprefix("torch.")]
    sizes = {one.rank: one.bytes_per_token for one in eight}
    assert sizes == {rank: 48 + 4 * 2 + rank + -(-rank // 12) * 2 for rank in (0, 1, 3, 6, 12, 18, 24)}
    assert [one for one in plan.candidates if one not in eight] == list(before.candidates)
    enough = [one for one in eight if one.output_error <= tolerance * judge.output_error]
    assert plan.chosen == (enough[0] if enough else before.chosen)


def test_what_cannot_be_is_refused_with_its_reason() -> None:
    weights = layer()
    dead = replace(weights, key=torch.cat([weights.key[:47], weights.key[:1]]))
    singular = plan_layer(dead, text(126))
    assert caches(singular) == {("kv", 0), ("x", 0)}
    assert "smallest singular value" in singular.refused["k+r"]
    wild = plan_layer(replace(weights, key=weights.key * 1e5, scale=1e-7), text(126), rotation=rope(126))
    assert caches(wild) == {("kv", 0)}
    assert "must stay below" in wild.refused["k"]
    assert "RoPE stands between" in wild.refused["x"]


def test_cross_attention_and_bad_arguments() -> None:
    plan = plan_layer(layer(), text(7), text(126))
    assert ("e", 0) in caches(plan)
    for dtype, remedy in (
        (torch.float32, "; repair the weights of the layers before, or the calibration input"),
        (torch.bfloat16, "; repair the weights of the layers before, or the calibration input"),
        (
            torch.float16,
            "whose largest number is 65504; convert the model in a dtype of wider range, such as bfloat16",
        ),
    ):
        with pytest.raises(
            ValueError, match=f"inputs on the calibration text hold inf or nan in {dtype}(, )?{remedy}$"
        ):
            plan_layer(layer(), text(126) * torch.nan, model_dtype=dtype)
    broken = replace(layer(), output=layer().output * torch.nan)
    for dtype, remedy in ((torch.float32, "repair the weights$"), (torch.float16, "convert in a wider dtype$")):
        with pytest.raises(ValueError, match=f"gives inf or nan with an ordinary cache .*{remedy}"):
            plan_layer(broken, text(126), model_dtype=dtype)


def test_ordinary_errors_are_those_of_attention_in_that_dtype() -> None:
    errors = CacheErrors(layer(), AttentionInputs(text(126), rotation=rope(126)))
    assert errors.ordinary(torch.float64).output_error == 0
    half, single = (errors.ordinary(dtype) for dtype in (torch.bfloat16, torch.float32))
    assert 0 < single.value_error < torch.finfo(torch.float32).eps < half.value_error < torch.finfo(torch.bfloat16).eps


def test_biases_of_scores_are_measured_with() -> None:
    """T5's of positions; the second half of the text is judged by its own part of them."""
    weights, seen = layer(biases=True), text(30)
    bias = 3 * torch.randn(4, 30, 30, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    judged, own = seen[15:], bias[:, 15:, 15:]
    errors = CacheErrors(weights, AttentionInputs(judged, score_bias=own))
    expected = attention_output(weights, judged, score_bias=own)
    assert relative(errors.output + weights.output_bias, expected) < IDENTICAL
    assert plan_layer(weights, seen, score_bias=bias).ordinary == errors.ordinary(torch.bfloat16)


@pytest.mark.parametrize("condition", [1e2, 1e4, 1e6])
def test_steep_spectra_end_in_ordinary_caches_or_good_ones(condition: float) -> None:
    """On no spectrum may the choice be worse than was asked for."""
    weights = replace(layer(), key=spectrum(48, 48, condition, torch.Generator().manual_seed(1)))
    plan = plan_layer(weights, text(252), rotation=rope(252))
    assert plan.chosen.output_error <= 2 * plan.ordinary.output_error


@lru_cache
def embedded() -> tuple[list[tuple[AttentionWeights, Tensor]], Rotation]:
    """Attention layers of the embedded model in bf16, with what they see on two prompts of different tasks."""
    model, tokenizer = load_embedded(torch.bfloat16)
    tasks = embedded_tasks()
    prompts = [few_shot_prompt(tasks[at + 6], tasks[at : at + 4]) for at in (0, 12)]
    ids = torch.cat([torch.tensor(tokenizer(prompt).input_ids)[:256] for prompt in prompts])[None]
    seen: list[Tensor] = []

    def keep(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        seen.append(kwargs["hidden_states"][0])

    layers = [block.self_attn for block in model.model.layers]
    hooks = [attention.register_forward_pre_hook(keep, with_kwargs=True) for attention in layers]
    with torch.no_grad():
        model(ids)
        for hook in hooks:
            hook.remove()
        cos, sin = model.model.rotary_emb(torch.zeros(1, dtype=torch.float32), torch.arange(ids.shape[1])[None])
    weights = [
        AttentionWeights(*(getattr(at, f"{name}_proj").weight.detach() for name in "qkvo"), heads=4) for at in layers
    ]
    return list(zip(weights, seen)), Rotation(cos[0], sin[0])


@lru_cache
def embedded_plans() -> list[LayerPlan]:
    layers, rotation = embedded()
    return [plan_layer(weights, inputs, rotation=rotation) for weights, inputs in layers]


def errors(plan: LayerPlan) -> dict[int, float]:
    """Output error by rank."""
    return {one.rank: one.output_error for one in plan.candidates if one.plan != "kv"}


def test_keys_alone_spoil_a_trained_layer() -> None:
    plans = embedded_plans()
    assert max(errors(plan)[0] / plan.ordinary.output_error for plan in plans) > 2
    assert any(plan.chosen.plan == "k+r" for plan in plans)


def test_an_eighth_of_v_coordinates_in_fp16_is_as_accurate_as_values_in_bf16() -> None:
    for plan in embedded_plans():
        eighth = next(one for one in plan.candidates if one.rank == 32)
        assert eighth.value_error <= plan.ordinary.value_error
        assert eighth.output_error <= plan.ordinary.output_error
        assert eighth.bytes_per_token == plan.ordinary.bytes_per_token * 9 // 16


def test_twice_the_coordinates_make_less_error_on_trained_layers() -> None:
    for plan in embedded_plans():
        by_rank = errors(plan)
        assert sorted(by_rank) == [0, 8, 16, 32, 64, 96, 128]
        ordered = [by_rank[rank] for rank in (0, 8, 16, 32, 64, 128)]
        assert ordered == sorted(ordered, reverse=True)


def test_trained_layers_store_at_most_60_percent() -> None:
    plans = embedded_plans()
    stored = sum(plan.chosen.bytes_per_token for plan in plans)
    ordinary = sum(plan.ordinary.bytes_per_token for plan in plans)
    assert stored <= 0.6 * ordinary
    assert all(plan.chosen.output_error <= 2 * plan.ordinary.output_error for plan in plans)


def test_trained_layers_in_int8() -> None:
    """Keys alone fail on every layer; few V-coordinates bring half of int8 keys and values within twice its error."""
    layers, rotation = embedded()
    for weights, inputs in layers:
        plan = plan_layer(weights, inputs, rotation=rotation, cache_dtype=torch.int8)
        assert plan.ordinary_int8 is not None
        by_rank = {one.rank: one.output_error for one in plan.candidates if one.dtype == "int8"}
        assert by_rank[0] > 10 * plan.ordinary_int8.output_error
        assert by_rank[32] < 2 * plan.ordinary_int8.output_error
        assert (plan.chosen.plan, plan.chosen.dtype) == ("k+r", "int8")
        assert plan.chosen.bytes_per_token < 0.6 * plan.ordinary_int8.bytes_per_token
        fp8 = plan_layer(weights, inputs, rotation=rotation, cache_dtype=torch.float8_e4m3fn)
        assert fp8.chosen.dtype == "float16"


def test_full_rank_is_an_ordinary_cache() -> None:
    """With all coordinates in the cache, values carry the rounding of the cache's dtype and that of W_V's storage."""
    layers, rotation = embedded()
    weights, inputs = layers[-1]
    plan = plan_layer(weights, inputs, rotation=rotation, rank_shares=(Fraction(1),))
    full = next(one for one in plan.candidates if one.rank == 256)
    assert full.bytes_per_token == plan.ordinary.bytes_per_token
    measured = CacheErrors(weights, AttentionInputs(inputs, rotation=rotation).part(slice(256, None)))
    assert full.value_error == pytest.approx(measured.ordinary(torch.float16).value_error, rel=0.05)


def test_inputs_of_a_model_are_exact_in_its_dtype() -> None:
    layers, _ = embedded()
    plan = plan_layer(*layers[0])
    assert next(one for one in plan.candidates if one.plan == "x").output_error == 0
    assert plan.chosen.plan == "x"


def test_keys_alone_err_by_what_the_map_makes_of_their_rounding() -> None:
    """Keys are rounded with their bias; the map is exact where they are not rounded."""
    weights, inputs = layer(biases=True), text(64)
    errors = ErrorsOfPaper(weights, AttentionInputs(inputs, rotation=rope(64)))
    for dtype in (torch.bfloat16, torch.float16):
        noise = errors.keys.to(dtype).double() - errors.keys
        wrong = noise @ torch.linalg.solve(weights.W_K, weights.W_V)
        found = errors.unfitted_keys(dtype)
        expected = (torch.linalg.norm(wrong) / torch.linalg.norm(errors.values)).item()
        assert found.value_error == pytest.approx(expected, rel=1e-6)
        assert (found.plan, found.bytes_per_token) == ("k", 2 * weights.W_K.shape[1])
    assert errors.unfitted_keys(torch.float64).output_error < 1e-9
