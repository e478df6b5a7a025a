"""Experts of a few rows, against fp64 and what transformers computes."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.integrations.moe import batched_mm_experts_forward

pytest.importorskip("triton")

from hf_fastdecode.kernels import ahead
from hf_fastdecode.kernels.experts import reference
from hf_fastdecode.kernels.experts.api import experts, grouped_experts, largest, route
from hf_fastdecode.kernels.experts.config import (
    MOST_OF_AN_EXPERT,
    MOST_PAIRS,
    Config,
    Configs,
    Gate,
    Routing,
    Shared,
    Weights,
    grouped_refusal,
    most_items,
    refusal,
    routing_refusal,
    shared_refusal,
)
from hf_fastdecode.kernels.pointwise.api import Activation

from ..cases import exhaustive_but
from .operator_runs import DEVICE, PRODUCT_DTYPES, assert_as_exact, random

GATES = {
    "silu": Gate(Activation.SILU),
    "gelu": Gate(Activation.GELU_TANH),
    "limited": Gate(Activation.SILU, alpha=1.702, limit=1.0, offset=1.0),
}


def weights_of(
    count: int, hidden: int, inner: int, dtype: torch.dtype, *, transposed: bool, interleaved: bool, biased: bool
) -> Weights:
    shapes = [(count, 2 * inner, hidden), (count, hidden, inner)]
    if transposed:
        shapes = [(first, third, second) for first, second, third in shapes]
    scale = hidden**-0.5
    gate_up, down = (random(*shape, seed=seed, dtype=dtype).mul_(scale) for seed, shape in enumerate(shapes))
    biases = [random(count, columns, seed=columns, dtype=dtype) if biased else None for columns in (2 * inner, hidden)]
    return Weights(gate_up, down, *biases, transposed=transposed, interleaved=interleaved)


def routed(rows: int, per_row: int, count: int, *, seed: int = 5) -> tuple[Tensor, Tensor]:
    """Experts of rows, of which low ones are chosen more often, and their shares."""
    scores = random(rows, count, seed=seed) - torch.arange(count, device=DEVICE) / count
    values, chosen = scores.topk(per_row)
    return chosen, values.softmax(-1)


def exact(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor, gate: Gate) -> Tensor:
    wide = [part.double() if isinstance(part, Tensor) else part for part in weights]
    return reference.experts(x.double(), Weights(*wide), chosen, shares.double(), gate)


def stock(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor, gate: Gate) -> Tensor:
    """What transformers' modules compute in decode steps."""
    module: Any = SimpleNamespace(
        gate_up_proj=weights.gate_up,
        gate_up_proj_bias=weights.gate_up_bias,
        down_proj=weights.down,
        down_proj_bias=weights.down_bias,
        has_gate=True,
        has_bias=weights.gate_up_bias is not None,
        has_post_expert_norm=False,
        is_transposed=weights.transposed,
        _is_expert_parallel=False,
        num_experts=weights.experts,
        _apply_gate=lambda numbers: reference.opened(numbers, weights, gate),
    )
    return batched_mm_experts_forward(module, x, chosen, shares.to(x.dtype))


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(
    ("layout", "gate"),
    [
        ({"transposed": False, "interleaved": False, "biased": False}, "silu"),
        ({"transposed": False, "interleaved": True, "biased": True}, "gelu"),
        ({"transposed": True, "interleaved": True, "biased": True}, "limited"),
        ({"transposed": True, "interleaved": False, "biased": True}, "limited"),
    ],
)
@pytest.mark.parametrize("rows", [1, 33])
def test_experts(rows: int, layout: dict[str, bool], gate: str, dtype: torch.dtype) -> None:
    """Columns that are no multiple of a tile, experts without rows, and those with more than one item."""
    weights = weights_of(5, 96, 160, dtype, **layout)
    x, (chosen, shares) = random(rows, 96, seed=1, dtype=dtype), routed(rows, 2, 5)
    configs = Configs(16, Config(64, 32, 2), Config(64, 32, 3))
    given = x, weights, chosen, shares, GATES[gate]
    assert refusal(*given[:-1]) is None
    found = experts(*given, configs)
    assert torch.equal(found, experts(*given, configs))
    assert_as_exact(found, stock(*given), exact(*given))


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(("rows", "count", "gate"), [(1, 1, "gelu"), (33, 3, "silu")])
def test_experts_of_all_rows(rows: int, count: int, gate: str, dtype: torch.dtype) -> None:
    """Their products are further items, of which some rows' are a part; sums differ by one rounding less."""
    weights = weights_of(5, 96, 160, dtype, transposed=False, interleaved=False, biased=False)
    joint = random(2 * count * 160, 96, seed=8, dtype=dtype) / 96**0.5
    shared = Shared(*joint.chunk(2), random(96, count * 160, seed=9, dtype=dtype) / (count * 160) ** 0.5)
    x, (chosen, shares) = random(rows, 96, seed=1, dtype=dtype), routed(rows, 2, 5)
    given = x, weights, chosen, shares, GATES[gate]
    assert shared_refusal(x, weights, shared) is None
    configs = Configs(16, Config(64, 32, 2), Config(64, 32, 3))
    found = experts(*given, configs, shared=shared)
    assert torch.equal(found, experts(*given, configs, shared=shared))
    wide = Shared(*(part.double() for part in shared))
    of_shared = (reference.shared_experts(one, two, GATES[gate]) for one, two in ((x, shared), (x.double(), wide)))
    own, of_all = (one + two for one, two in zip((stock(*given), exact(*given)), of_shared, strict=True))
    assert_as_exact(found, own, of_all)
    assert shared_refusal(x, weights, Shared(shared.gate[1:], shared.up[1:], shared.down[:, 1:])) is not None
    assert shared_refusal(x, weights._replace(interleaved=True), shared) is not None


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(
    ("transposed", "gate"),
    exhaustive_but([(False, "silu"), (True, "limited")], [(order, gate) for gate in GATES for order in (False, True)]),
)
def test_grouped_experts(transposed: bool, gate: str, dtype: torch.dtype) -> None:
    """Both orders of weights and of gates, with biases and without, and an expert without rows."""
    if DEVICE == "cuda" and dtype != torch.bfloat16:
        pytest.skip("grouped_experts serves bf16 alone on GPUs, as only its grouped products are fast in PyTorch")
    for interleaved, biased, rows in ((False, False, 1), (True, True, 70), (False, True, 33)):
        layout = {"transposed": transposed, "interleaved": interleaved, "biased": biased}
        weights = weights_of(5, 96, 160, dtype, **layout)
        x, (chosen, shares) = random(rows, 96, seed=1, dtype=dtype), routed(rows, 2, 4)
        given = x, weights, chosen, shares, GATES[gate]
        assert grouped_refusal(*given[:-1]) is None
        found = grouped_experts(*given)
        assert torch.equal(found, grouped_experts(*given))
        assert_as_exact(found, stock(*given), exact(*given))


def test_numbers_that_are_none_stay_so() -> None:
    weights = weights_of(3, 64, 32, torch.float16, transposed=False, interleaved=False, biased=False)
    x, chosen = random(3, 64, seed=1, dtype=torch.float16), torch.tensor([[0], [1], [1]], device=DEVICE)
    x[1, 7] = torch.nan
    found = experts(x, weights, chosen, torch.ones(3, 1, device=DEVICE), GATES["limited"])
    assert found.isnan().all(1).tolist() == found.isnan().any(1).tolist() == [False, True, False]


def test_experts_that_the_layer_does_not_have_add_nothing() -> None:
    weights = weights_of(3, 64, 32, torch.float16, transposed=False, interleaved=False, biased=False)
    x, chosen = random(4, 64, seed=1, dtype=torch.float16), torch.tensor([[0, 3], [2, -1], [3, 3], [1, 2]])
    shares = torch.ones(4, 2, dtype=torch.float16, device=DEVICE)
    found = experts(x, weights, chosen.to(DEVICE), shares, GATES["silu"])
    for row, own in enumerate(([0], [2], [], [1, 2])):
        one = torch.tensor([own], dtype=torch.int64, device=DEVICE)
        expected = exact(x[row : row + 1], weights, one, torch.ones(1, len(own), device=DEVICE), GATES["silu"])
        torch.testing.assert_close(found[row : row + 1].double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("rows", "count", "per_row"), [(1, 4, 2), (128, 8, 2), (64, 128, 8), (512, 3, 1)])
def test_every_pair_has_a_place(rows: int, count: int, per_row: int) -> None:
    """Lists of pairs as many as can be, with all rows on one expert and with rows spread."""
    from hf_fastdecode.kernels.experts import kernel

    pairs = rows * per_row
    assert pairs <= MOST_PAIRS
    spread = routed(rows, per_row, count)[0]
    for chosen, block in product((spread, spread * 0 + count - 1), (16, 64)):
        most = most_items(pairs, count, block)
        order = torch.full((pairs,), -1, dtype=torch.int32, device=DEVICE)
        items = torch.full((most, 3), -1, dtype=torch.int32, device=DEVICE)
        sizes = {"BLOCK_P": max(16, 1 << (pairs - 1).bit_length()), "BLOCK_Q": 16, "BLOCK_M": block}
        sizes |= {"BLOCK_E": 1 << (count - 1).bit_length(), "BLOCK_I": 1 << (most - 1).bit_length()}
        kernel.list_pairs[(-(-pairs // 16),)](chosen, order, items, pairs, most, EXPERTS=count, **sizes, PDL=False)
        flat = chosen.flatten()
        assert torch.equal(order.long(), flat.argsort(stable=True))
        listed = [(expert, place) for expert, begin, end in items.tolist() for place in range(begin, end)]
        assert sorted(place for _, place in listed) == list(range(pairs))
        assert all(flat[order[place]] == expert for expert, place in listed)
        assert all(end - begin <= block for _, begin, end in items.tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "columns", "count"), [(1, 4, 2), (5, 33, 8), (3, 128, 8), (2, 1, 1)])
def test_largest(rows: int, columns: int, count: int, dtype: torch.dtype) -> None:
    scores = random(rows, columns, seed=1, dtype=dtype)
    scores[0, 0] = -0.5
    values, places = largest(scores, count)
    expected, where = scores.sort(dim=-1, descending=True, stable=True)
    assert (values.dtype, places.dtype) == (dtype, torch.int64)
    assert torch.equal(values, expected[:, :count])
    assert torch.equal(places, where[:, :count])


def test_largest_of_equal_and_other_numbers() -> None:
    inf = float("inf")
    scores = torch.tensor([[1.0, 2.0, 2.0, -inf], [float("nan"), inf, 0.0, 3.0], [-inf] * 4], device=DEVICE)
    assert largest(scores, 3)[1].tolist() == [[1, 2, 0], [0, 1, 3], [0, 1, 2]]


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(("rows", "count", "width"), [(1, 4, 64), (5, 33, 300), (16, 32, 2880), (32, 128, 512)])
def test_route(rows: int, count: int, width: int, dtype: torch.dtype) -> None:
    x, bias = random(rows, width, seed=1, dtype=dtype), random(count, seed=2, dtype=dtype)
    weight = (random(count, width, seed=3) / width**0.5).to(dtype)
    for first, whole, own in product((False, True), (False, True), (None, bias)):
        given = x, weight, own, Routing(min(4, count), first, whole)
        assert routing_refusal(*given) is None
        found, again = route(*given), route(*given)
        assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))
        scores, shares, chosen = found
        expected = reference.route(*given)
        assert [(one.shape, one.dtype) for one in found] == [(one.shape, one.dtype) for one in expected]
        exact = x.double() @ weight.double().T + (0 if own is None else own.double())
        assert_as_exact(scores, expected[0], exact)
        # What is chosen of the same scores, of equal ones the first.
        assert torch.equal(chosen, scores.float().sort(dim=-1, descending=True, stable=True)[1][:, : chosen.shape[1]])
        of_all = scores.double().softmax(-1).gather(1, chosen)
        own_shares = of_all if first else scores.double().gather(1, chosen).softmax(-1)
        torch.testing.assert_close(shares.double(), own_shares, rtol=torch.finfo(shares.dtype).eps * 4, atol=1e-6)


@pytest.mark.parametrize("dtype", PRODUCT_DTYPES)
@pytest.mark.parametrize(("rows", "count", "groups", "kept"), [(3, 8, 1, 1), (70, 24, 4, 2), (33, 64, 8, 3)])
def test_route_by_scores_in_fp32(rows: int, count: int, groups: int, kept: int, dtype: torch.dtype) -> None:
    """Of weights in fp32 or that of rows, in several blocks of rows; from the groups with the largest experts."""
    x, weight = random(rows, 300, seed=1, dtype=dtype), random(count, 300, seed=3) / 300**0.5
    routing = Routing(3, first=True, whole=True, wide=True, scale=2.5, groups=groups, kept=kept)
    bias, corrected = random(count, seed=4), routing._replace(corrected=True, normed=True)
    for own, added, how in ((weight, None, routing), (weight.to(dtype), None, routing), (weight, bias, corrected)):
        assert routing_refusal(x, own, added, how) is None
        found, expected = (one(x, own, added, how) for one in (route, reference.route))
        exact = reference.route(x.double(), own.double(), None if added is None else added.double(), how)
        for one, two in zip(found, expected, strict=True):
            assert (one.shape, one.dtype) == (two.shape, two.dtype)
        assert_as_exact(found[0], expected[0], exact[0])
        assert torch.equal(found[2], exact[2])
        torch.testing.assert_close(found[1].double(), exact[1], rtol=1e-5, atol=1e-6)
    assert routing_refusal(x, weight, bias, corrected._replace(groups=5)) is not None
    assert routing_refusal(x, weight, None, corrected) is not None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("width", [2048, 7168])
def test_scores_in_fp32_are_near_fp64(width: int, dtype: torch.dtype) -> None:
    """Error at most twice that of PyTorch's products in fp32, of elements of equal and mixed magnitudes and signs."""
    routing = Routing(6, first=True, whole=True, wide=True)
    for mixed, positive, wide in product((False, True), (False, True), (False, True)):
        x, weight = (random(count, width, seed=count) for count in (100, 64))
        if mixed:
            x, weight = (part * torch.exp2(2 * random(*part.shape, seed=width)) for part in (x, weight))
        if positive:
            x, weight = x.abs(), weight.abs()
        x, weight = x.to(dtype), (weight / width**0.5).to(torch.float32 if wide else dtype)
        exact = x.double() @ weight.double().T
        error, of_pytorch = (
            one.double() - exact for one in (route(x, weight, None, routing)[0], F.linear(x.float(), weight.float()))
        )
        case = f"{mixed=} {positive=} {wide=}"
        assert error.norm() <= 2 * of_pytorch.norm(), case
        assert error.abs().max() <= 2 * of_pytorch.abs().max(), case


def test_indices_of_launches_that_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels may compile in a pass that launches none: a model's code then gathers by what it is given."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, **options: empty(*size, **options).fill_(99))
    token = ahead._left_out.set(SimpleNamespace(covers=lambda *_: True))
    try:
        x = random(3, 64, seed=1, dtype=torch.float16)
        found = largest(x, 2)[1], route(x, x, None, Routing(2, first=False, whole=False))[2]
    finally:
        ahead._left_out.reset(token)
    assert all(not places.any() for places in found)


def test_what_is_not_served() -> None:
    weights = weights_of(4, 64, 32, torch.float16, transposed=False, interleaved=False, biased=False)
    x, (chosen, shares) = random(2, 64, seed=1, dtype=torch.float16), routed(2, 2, 4)

    def reason(x: Tensor = x, weights: Weights = weights, chosen: Tensor = chosen, shares: Tensor = shares) -> str:
        return refusal(x, weights, chosen, shares) or ""

    assert reason() == ""
    assert "up to 128 pairs" in reason(x.repeat(33, 1), weights, chosen.repeat(33, 1), shares.repeat(33, 1))
    assert "one dtype" in reason(x.float())
    assert "whole numbers" in reason(chosen=chosen.float())
    assert "rows [rows, hidden]" in reason(x[None])
    assert "other shapes" in reason(weights=weights._replace(down=weights.gate_up))
    assert "contiguous weights" in reason(weights=weights._replace(down=weights.down.mT.contiguous().mT))
    assert "no gradients" in reason(shares=shares.clone().requires_grad_())


SHAPES = {
    "gpt-oss-20b": (32, 4, 2880, 2880, {"transposed": True, "interleaved": True, "biased": True}, "limited"),
    "qwen3-30b-a3b": (128, 8, 2048, 768, {"transposed": False, "interleaved": False, "biased": False}, "silu"),
    "mixtral-8x7b": (8, 2, 4096, 14336, {"transposed": False, "interleaved": False, "biased": False}, "silu"),
}


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_chosen_configurations(shape: str) -> None:
    """Shapes of models, at numbers of rows up to the most that are served, also in a captured graph."""
    count, per_row, hidden, inner, layout, gate = SHAPES[shape]
    weights = weights_of(count, hidden, inner, torch.bfloat16, **layout)
    for rows in {1, 16, 64, min(MOST_PAIRS, MOST_OF_AN_EXPERT * count) // per_row}:
        x, (chosen, shares) = random(rows, hidden, seed=1, dtype=torch.bfloat16), routed(rows, per_row, count)
        given = x, weights, chosen, shares, GATES[gate]
        assert refusal(*given[:-1]) is None
        found = experts(*given)
        assert_as_exact(found, reference.experts(*given[:3], shares.bfloat16(), given[-1]), exact_by_expert(*given))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            replayed = experts(*given)
        other = routed(rows, per_row, count, seed=6)
        for part, changed in zip((chosen, shares), other, strict=True):
            part.copy_(changed)
        graph.replay()
        assert torch.equal(replayed, experts(*given))


def exact_by_expert(x: Tensor, weights: Weights, chosen: Tensor, shares: Tensor, gate: Gate) -> Tensor:
    """As `exact`, with one expert's weights in fp64 at a time."""
    total = torch.zeros_like(x, dtype=torch.float64)
    for expert in chosen.unique().tolist():
        parts = [part[expert : expert + 1] if isinstance(part, Tensor) else part for part in weights]
        share = torch.where(chosen == expert, shares, 0).sum(1, keepdim=True)
        total += exact(x, Weights(*parts), torch.zeros_like(chosen[:, :1]), share, gate)
    return total
