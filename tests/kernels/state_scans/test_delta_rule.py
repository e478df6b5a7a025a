"""The gated delta rule over segments of many tokens, against an exact one and transformers' code in the same dtype."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from transformers.models.qwen3_5.modeling_qwen3_5 import torch_chunk_gated_delta_rule

from hf_fastdecode.kernels.state_scans import api, reference
from hf_fastdecode.kernels.state_steps.api import Gates

from ..operator_runs import BF16, DEVICE, random

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Case(NamedTuple):
    """Lengths of segments, and how fast states decay: by some orders of magnitude at a token, or by a thousandth."""

    lengths: tuple[int, ...]
    key_heads: int = 1
    heads: int = 1
    key_dim: int = 16
    value_dim: int = 16
    decay: float = 0.5
    resumed: bool = False

    def __str__(self) -> str:
        sizes = f"h{self.heads}-{self.key_heads}-d{self.key_dim}-{self.value_dim}-decay{self.decay}"
        return f"{'x'.join(map(str, self.lengths))}-{sizes}{'-resumed' * self.resumed}"


SMALL = (
    Case((1,)),
    Case((63,), decay=1e-3),
    Case((64,), key_dim=24, value_dim=40),
    Case((65,), heads=2, decay=20.0, resumed=True),
    Case((2, 0, 66, 1), resumed=True, decay=1e-3),
    Case((5, 1), 1, 2, 128, 32, resumed=True),
)
LARGE = (
    Case((4096,), 16, 32, 128, 128),
    Case((1, 63, 64, 65, 8191), 2, 4, 128, 128, decay=1e-3, resumed=True),
    Case((8191, 3000), 2, 2, 96, 192, decay=20.0),
)


def inputs_of(case: Case, dtype: torch.dtype) -> list[Tensor | None]:
    tokens, of_values = sum(case.lengths), (case.heads, case.value_dim)
    both = random(tokens, 2 * case.key_heads, case.key_dim, seed=1, dtype=dtype)
    value, beta = random(tokens, *of_values, seed=2, dtype=dtype), random(tokens, case.heads, seed=4, dtype=dtype)
    decay = -case.decay * random(tokens, case.heads, seed=3).exp()
    states = random(len(case.lengths), case.heads, case.key_dim, case.value_dim, seed=5) if case.resumed else None
    starts = torch.tensor([0, *case.lengths], device=DEVICE).cumsum(0).int()
    return [both[:, : case.key_heads], both[:, case.key_heads :], value, decay, beta.sigmoid(), starts, states]


def stock(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, starts: Tensor, states: Any) -> Any:
    """transformers' code, segment by segment."""
    group, outs, final = value.shape[1] // query.shape[1], [], []
    run = inspect.unwrap(torch_chunk_gated_delta_rule)
    query, key = (one.repeat_interleave(group, 1) for one in (query, key))
    for segment, (start, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist())):
        given = (one[None, start:end] for one in (query, key, value))
        named = {"g": decay[None, start:end], "beta": beta[None, start:end], "output_final_state": True}
        before = None if states is None else states[segment : segment + 1]
        out, after = run(*given, **named, initial_state=before, use_qk_l2norm_in_kernel=True)
        outs.append(out[0])
        final.append(after)
    return torch.cat(outs), torch.cat(final)


def check(case: Case, dtype: torch.dtype) -> None:
    """Errors are at most 1.1 times those of stock's code; what both compute in fp32 may differ by a rounding."""
    given = inputs_of(case, dtype)
    found = api.delta_rule(*given)
    own = stock(*given)
    exact = reference.delta_rule(
        *(one.double() if one is not None and one.dtype != torch.int32 else one for one in given)
    )
    for one, two, three in zip(found, own, exact, strict=True):
        assert (one.shape, one.dtype) == (two.shape, two.dtype)
        rounding = torch.finfo(torch.float32).eps * (one.dtype == torch.float32)
        assert (one - three).norm() <= 1.1 * (two - three).norm() + rounding * three.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=NAMES.get)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_delta_rule(case: Case, dtype: torch.dtype) -> None:
    if dtype == torch.float32 and DEVICE == "cpu" and case not in SMALL[3:5]:
        pytest.skip("interpreted for long; fp16 has the same products and fewer")
    check(case, dtype)


def test_outputs_of_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those in bf16 are made: exact enough for fp16 too."""
    monkeypatch.setitem(api._OUT_PARTS, torch.float16, 2)
    check(SMALL[4], torch.float16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=NAMES.get)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_large(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.parametrize("dtype", [torch.float16, BF16], ids=NAMES.get)
def test_of_projections(dtype: torch.dtype) -> None:
    """Decays and betas are made in the kernel, large ones too: as exact as of those that PyTorch makes of them."""
    query, key, value, _, _, starts, _ = inputs_of(Case((66,), heads=2), dtype)
    decay, beta = (8 * random(66, 2, seed=seed, dtype=dtype) for seed in (6, 7))
    gates = Gates(random(2, seed=8), random(2, seed=9, dtype=dtype))
    made = -gates.rates.exp() * torch.nn.functional.softplus(decay.float() + gates.biases)
    expected = api.delta_rule(query, key, value, made, beta.sigmoid(), starts, None)
    for one, two in zip(api.delta_rule(query, key, value, decay, beta, starts, None, gates), expected, strict=True):
        torch.testing.assert_close(one, two, rtol=2 * torch.finfo(dtype).eps, atol=1e-4)


def test_steps_so_small_that_one_more_is_rounded() -> None:
    """Rounded sums of one and such a step would let all tokens decay too little, or too much."""
    query, key, value, _, beta, starts, states = inputs_of(Case((66,), resumed=True), torch.float16)
    decay, gates = torch.full_like(beta, -9.25), Gates(random(1, seed=8).abs() + 2.5, beta[0] * 0)
    _, found = api.delta_rule(query, key, value * 0, decay, beta * 0 - 20.0, starts, states, gates)
    exact = states.double() * (-66 * gates.rates.double().exp() * torch.exp(decay[0].double()).log1p())[:, None].exp()
    assert (found - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.gpu
def test_other_lengths_compile_nothing() -> None:
    """Nor do states to begin with."""
    from hf_fastdecode.kernels.state_scans import convolution, delta

    kernels = delta.relate, delta.invert, delta.scan, convolution.convolve
    counts = []
    for lengths in ((7,), (64, 16), (1000, 1, 33)):
        given = inputs_of(Case(lengths, 2, 4, 128, 128, resumed=len(lengths) == 2), torch.bfloat16)
        api.delta_rule(*given)
        x, weight = given[2].flatten(1), random(512, 4, seed=1, dtype=torch.bfloat16)
        states = random(2, 512, 4, seed=2, dtype=torch.bfloat16) if len(lengths) == 2 else None
        api.convolve(x, given[5], states, weight, None, silu=True, length=4)
        counts.append([len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in kernels])
    assert counts[0] == counts[1] == counts[2]


def test_refused() -> None:
    given = inputs_of(Case((3,)), torch.float16)
    with pytest.raises(ValueError, match="of up to 128 elements of a key, got"):
        api.delta_rule(*given[:6], random(1, 1, 16, 16, seed=1).mT)
