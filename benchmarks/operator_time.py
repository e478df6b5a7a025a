"""Times of operators, warm and with inputs outside the L2 cache, and the device's ceilings, measured in the same run.

On CUDA, calls are captured in one graph that runs over all their input sets, which together are larger than the cache:
no launch overhead, no warm cache. Elsewhere, a wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from statistics import median
from typing import TypeVar

import torch

from hf_fastdecode.measurement.calls import Times, percentiles

from .ops.cases import OpCase

Output = TypeVar("Output")

_LEAST_GRAPH_S = 2e-3  # a replay this long makes the gap before it small
_MOST_LAUNCHES = 512


def in_us(times: Times) -> dict[str, float]:
    return {f"us_{name}": 1e6 * seconds for name, seconds in times._asdict().items()}


def time_operator(
    calls: Sequence[Callable[[], Output]], device: torch.device, *, budget_s: float = 0.06
) -> tuple[Times, Output]:
    """Seconds of one of calls that are alike but for their inputs, and what the first one returned when last timed.

    The inputs together should not fit into the L2 cache; `budget_s` is about how long to measure.
    """
    if device.type != "cuda":
        return _time_on_cpu(calls, budget_s)
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for call in calls:  # compiles, plans, and allocates what is allocated once
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph, output = _captured(calls, rounds=1)
    seconds = min(replays(graph.replay, 2))
    rounds = min(math.ceil(_LEAST_GRAPH_S / seconds), max(1, _MOST_LAUNCHES // len(calls)))
    if rounds > 1:
        del graph, output
        graph, output = _captured(calls, rounds)
        seconds *= rounds
    samples = replays(graph.replay, max(5, min(30, int(budget_s / seconds))))
    return percentiles([sample / (rounds * len(calls)) for sample in samples]), output


def _captured(calls: Sequence[Callable[[], Output]], rounds: int) -> tuple[torch.cuda.CUDAGraph, Output]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            output = _once(calls)
    return graph, output


def replays(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of each call; two that are not measured keep the device busy, so that no launch is waited for."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    call()
    call()
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def _once(calls: Sequence[Callable[[], Output]]) -> Output:
    output = calls[0]()
    for call in calls[1:]:
        call()
    return output


def _time_on_cpu(calls: Sequence[Callable[[], Output]], budget_s: float) -> tuple[Times, Output]:
    output = calls[0]()
    samples: list[float] = []
    while len(samples) < 3 or (len(samples) < 20 and sum(samples) * len(calls) < budget_s):
        start = time.perf_counter()
        output = _once(calls)
        samples.append((time.perf_counter() - start) / len(calls))
    return percentiles(samples), output


# Clocks follow power: from one short measurement to the next, a GPU multiplies matrices a fifth faster or slower. One
# alone would move the floors of all operators, which are timed at many moments.
_BURSTS = 9
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device: of an element-wise kernel, and of a large product of bf16 matrices (on a CPU of fp32)."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, case: OpCase, itemsize: int) -> float:
        """Least seconds of a case: its bytes at one rate, or its arithmetic at the other."""
        return max(case.bytes(itemsize) / self.bytes_per_s, case.flops / self.flops_per_s)


class OperatorBench:
    """A device, its ceilings, and whether a way is timed only if its error is within the rule."""

    def __init__(self, device: torch.device, *, check: bool = True):
        self.device, self.check = device, check

    @cached_property
    def ceilings(self) -> Ceilings:
        return measure_ceilings(self.device)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure both rates: on a GPU, medians of short measurements with pauses between them.

    The streaming kernel is an addition: a plain copy in a CUDA graph becomes a copy node, which is a third slower.
    """
    cuda = device.type == "cuda"
    x = torch.randn(2**28 if cuda else 2**21, device=device)
    y = torch.empty_like(x)
    streaming = _seconds(lambda: torch.add(x, 1.0, out=y), device)
    size, dtype = (8192, torch.bfloat16) if cuda else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    multiplying = _seconds(lambda: a @ b, device)
    return Ceilings(2 * x.nbytes / streaming, 2 * size**3 / multiplying)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return time_operator([call] * 4, device)[0].p50
    found = []
    for _ in range(_BURSTS):
        time.sleep(_PAUSE_S)
        found.append(time_operator([call] * 4, device)[0].p50)
    return median(found)
