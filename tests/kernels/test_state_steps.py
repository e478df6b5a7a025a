"""Steps of convolutions, the gated delta rule and Mamba-2, against exact ones and PyTorch's in the same dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from hf_fastdecode.kernels.state_steps import api, reference
from hf_fastdecode.kernels.state_steps.api import Gates

from .operator_runs import DTYPES, random

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def wide(part: Any) -> Any:
    """In fp64: a tensor, or those of gates."""
    return part.double() if isinstance(part, Tensor) else part and Gates(*(one.double() for one in part))


def assert_exact(name: str, *given: Any, states: int = -1, **named: bool) -> None:
    """Errors of results and states are at most twice those of the reference in the same dtype, and a rounding.

    Args:
        states: Position of the states, which are overwritten, among the arguments.
    """
    exact = getattr(reference, name)(*map(wide, given), **named)
    expected = getattr(reference, name)(*given, **named)
    held = [one.clone() if one is given[states] else one for one in given]
    found = getattr(api, name)(*held, **named), held[states]
    for one, two, three in zip(found, expected, exact, strict=True):
        assert one.shape == two.shape
        bound = 2 * (two.to(one.dtype) - three).abs().max() + torch.finfo(one.dtype).eps * three.abs().max()
        assert (one - three).abs().max() <= bound


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize(("length", "taps"), [(4, 4), (3, 3), (3, 4)])
@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased-silu"])
def test_convolve(length: int, taps: int, biased: bool, dtype: torch.dtype) -> None:
    rows, channels = 3, 300
    x = random(rows, 2 * channels, seed=1, dtype=dtype)[:, channels:]
    states = random(rows, channels, length, seed=2, dtype=dtype)
    weight, bias = random(channels, taps, seed=3, dtype=dtype), random(channels, seed=4, dtype=dtype)
    assert_exact("convolve", x, states, weight, bias if biased else None, states=1, silu=biased)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize(
    ("rows", "key_heads", "heads", "key_dim", "value_dim"), [(1, 1, 1, 16, 16), (3, 2, 4, 128, 128), (2, 3, 3, 24, 40)]
)
def test_delta_rule(rows: int, key_heads: int, heads: int, key_dim: int, value_dim: int, dtype: torch.dtype) -> None:
    both = random(rows, 2 * key_heads, key_dim, seed=1, dtype=dtype)
    value = random(rows, heads, value_dim, seed=2, dtype=dtype)
    decay = -random(rows, heads, seed=3, dtype=torch.float32).exp()
    beta = random(rows, heads, seed=4, dtype=dtype).sigmoid()
    states = random(rows, heads, key_dim, value_dim, seed=5, dtype=torch.float32)
    assert_exact("delta_rule", both[:, :key_heads], both[:, key_heads:], value, decay, beta, states)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
def test_delta_rule_of_projections(dtype: torch.dtype) -> None:
    """Decays and betas are made in the kernel; large ones, too."""
    query, key, value = (random(3, heads, 16, seed=heads + at, dtype=dtype) for at, heads in ((0, 2), (5, 2), (0, 4)))
    decay, beta = (12 * random(3, 4, seed=seed, dtype=dtype) for seed in (3, 4))
    gates = Gates(random(4, seed=6, dtype=torch.float32), random(4, seed=7, dtype=dtype))
    states = random(3, 4, 16, 16, seed=5, dtype=torch.float32)
    assert_exact("delta_rule", query, key, value, decay, beta, states, gates, states=5)


@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.get)
@pytest.mark.parametrize(
    ("rows", "groups", "heads", "width", "size"), [(1, 1, 1, 16, 16), (3, 2, 4, 64, 128), (2, 1, 3, 24, 40)]
)
def test_scan(rows: int, groups: int, heads: int, width: int, size: int, dtype: torch.dtype) -> None:
    both = random(rows, 2 * groups, size, seed=1, dtype=dtype)
    x, steps = random(rows, heads, width, seed=2, dtype=dtype), 12 * random(rows, heads, seed=3, dtype=dtype)
    rates = -random(heads, seed=4, dtype=torch.float32).exp()
    skips, biases = (random(heads, seed=seed, dtype=dtype) for seed in (5, 6))
    states = random(rows, heads, width, size, seed=7, dtype=torch.float32)
    assert_exact("scan", x, steps, rates, both[:, :groups], both[:, groups:], skips, biases, states)


def test_refused() -> None:
    x = random(2, 8, seed=1, dtype=torch.float32)
    with pytest.raises(ValueError, match=r"convolve takes .* got \(2, 8\), \(2, 8, 3\), \(8, 5\)"):
        api.convolve(x, x.new_zeros(2, 8, 3), x.new_zeros(8, 5), None, silu=True)
    heads = x.view(2, 1, 8)
    with pytest.raises(ValueError, match=r"contiguous states \[rows, heads, key_dim, value_dim\]"):
        api.delta_rule(heads, heads, heads, x[:, :1], x[:, :1], x.new_zeros(2, 1, 8, 8).mT)
    with pytest.raises(ValueError, match="of up to 256 elements of an input"):
        api.scan(heads, x, x[0], heads, heads, x[0], x[0], x.new_zeros(2, 1, 8, 8))
