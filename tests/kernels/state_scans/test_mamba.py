"""Mamba-2's scan over segments of many tokens, against an exact one and transformers' code in the same dtype."""

from __future__ import annotations

import inspect
from itertools import pairwise
from math import inf
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from transformers.models.nemotron_h.modeling_nemotron_h import mamba2_chunk_scan

from hf_fastdecode.kernels.state_scans import api, reference

from ..operator_runs import DEVICE, random

NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


class Case(NamedTuple):
    """Lengths of segments, and decays: steps of this size, in which states shrink at rates around this one."""

    lengths: tuple[int, ...]
    groups: int = 1
    heads: int = 1
    width: int = 16
    size: int = 16
    steps: float = 1.0
    rate: float = 1.0
    resumed: bool = False
    limits: tuple[float, float] = (0.0, inf)

    def __str__(self) -> str:
        sizes = f"h{self.heads}-{self.groups}-d{self.width}-{self.size}-steps{self.steps}-rate{self.rate}"
        return f"{'x'.join(map(str, self.lengths))}-{sizes}{'-resumed' * self.resumed}"


SMALL = (
    Case((1,), resumed=True),
    Case((63,), rate=1e-3),
    Case((64,), 2, 4, 24, 40),
    Case((65,), 1, 3, steps=12.0, rate=20.0, resumed=True),
    Case((2, 0, 66, 1), 1, 2, rate=1e-2, resumed=True, limits=(0.3, 1.5)),
    Case((70,), width=40, size=128),
)
LARGE = (
    Case((2048,), 2, 32, 64, 128),
    Case((1, 63, 64, 65, 8191), 2, 4, 128, 256, rate=1e-3, resumed=True),
    Case((8191, 3000), 1, 24, 64, 64, steps=12.0, rate=20.0),
)


def inputs_of(case: Case, dtype: torch.dtype) -> list[Tensor | None]:
    tokens, heads = sum(case.lengths), case.heads
    both = random(tokens, 2 * case.groups, case.size, seed=1, dtype=dtype)
    x, steps = random(tokens, heads, case.width, seed=2, dtype=dtype), random(tokens, heads, seed=3, dtype=dtype)
    skips, biases = (random(heads, seed=seed, dtype=dtype) for seed in (5, 6))
    states = random(len(case.lengths), heads, case.width, case.size, seed=7) if case.resumed else None
    rates, starts = -case.rate * random(heads, seed=4).exp(), torch.tensor((0, *case.lengths)).cumsum(0).int()
    given, read = both.split(case.groups, 1)
    return [x, case.steps * steps, rates, given, read, skips, biases, starts.to(DEVICE), states]


def of_transformers(*arguments: Any, limits: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """Segment by segment."""
    x, steps, rates, given, read, skips, biases, starts, states = arguments
    outputs, after = [], []
    for number, (start, end) in enumerate(pairwise(starts.tolist())):
        before = None if states is None else states[number : number + 1]
        if start == end:
            after.append(before)
            continue
        parts = (one[None, start:end] for one in (x, steps, given, read))
        number_of, step, one, other = parts
        named = {"D": skips, "dt_bias": biases, "dt_softplus": True, "dt_limit": limits, "initial_states": before}
        run = inspect.unwrap(mamba2_chunk_scan)
        out, state = run(number_of, step, rates, one, other, chunk_size=128, return_final_states=True, **named)
        outputs.append(out[0])
        after.append(state)
    return torch.cat(outputs), torch.cat(after)


def check(case: Case, dtype: torch.dtype) -> None:
    """Errors of outputs and states are at most 1.1 times those of transformers' code, and a rounding of fp32."""
    arguments = inputs_of(case, dtype)
    wide: list[Any] = [one.double() if one is not None and one.is_floating_point() else one for one in arguments]
    exact = reference.scan(*wide, limits=case.limits)
    stock = of_transformers(*arguments, limits=case.limits)
    found = api.scan(*arguments, limits=case.limits)
    for one, two, three in zip(found, stock, exact, strict=True):
        assert one.dtype == torch.float32
        assert one.shape == three.shape
        most = 1.1 * (two - three).norm() + torch.finfo(torch.float32).eps * three.norm()
        assert (one - three).norm() <= most


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=NAMES.get)
@pytest.mark.parametrize("case", SMALL, ids=str)
def test_scan(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.parametrize("case", [SMALL[3], SMALL[5]], ids=str)
def test_scan_in_fp32(case: Case) -> None:
    check(case, torch.float32)


def test_steps_that_are_no_numbers_stay_so() -> None:
    """From their tokens on, in their segment alone."""
    arguments: list[Any] = inputs_of(Case((6, 3)), torch.float16)
    arguments[1][2] = torch.nan
    out, after = api.scan(*arguments)
    assert out.isnan().flatten(1).all(1).tolist() == [False] * 2 + [True] * 4 + [False] * 3
    assert after.isnan().flatten(1).any(1).tolist() == [True, False]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.get)
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_scan_of_large_models(case: Case, dtype: torch.dtype) -> None:
    check(case, dtype)


@pytest.mark.gpu
def test_no_length_compiles_again() -> None:
    from hf_fastdecode.kernels.state_scans.mamba import relate, scan

    counts = set()
    for lengths in ((64,), (1, 65), (16,) * 16, (4096, 3)):
        check(Case(lengths, 1, 3), torch.bfloat16)
        counts.add(tuple(len(kernel.device_caches[torch.cuda.current_device()][0]) for kernel in (relate, scan)))
    assert len(counts) == 1


def test_refused() -> None:
    arguments: list[Any] = inputs_of(SMALL[0], torch.float16)
    for at, other in ((0, arguments[0].mT), (7, arguments[7].long()), (8, arguments[8].mT), (3, arguments[3][:, :0])):
        with pytest.raises(ValueError, match=r"scan takes x \[tokens, heads, width\]"):
            api.scan(*arguments[:at], other, *arguments[at + 1 :])
