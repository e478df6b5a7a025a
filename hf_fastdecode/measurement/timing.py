"""The one timing core: what is timed is warm, synchronised, and for operators finds its inputs outside the L2 cache.

On CUDA, calls are captured in one graph that runs over all their input sets, which together are larger than the cache:
no launch overhead, no warm cache. Elsewhere, and for whole calls of `generate`, a wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple, TypeVar

import torch

Output = TypeVar("Output")

_LEAST_GRAPH_S = 2e-3  # a replay this long makes the gap before it small
_MOST_LAUNCHES = 512


class Times(NamedTuple):
    """Seconds: the median, between the 20th and the 80th percentile."""

    p20: float
    p50: float
    p80: float

    def in_us(self) -> dict[str, float]:
        """Microseconds as columns of a measurement."""
        return {f"us_{name}": 1e6 * seconds for name, seconds in self._asdict().items()}


def percentiles(samples: Sequence[float]) -> Times:
    """The three percentiles of measured seconds, by the nearest rank."""
    ordered = sorted(samples)
    last = len(ordered) - 1
    return Times(ordered[round(0.2 * last)], median(ordered), ordered[round(0.8 * last)])


def synchronize(device: torch.device) -> None:
    """Wait for the device, where there is one to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def idle_time(device: torch.device) -> float:
    """`time.perf_counter` once the device is idle."""
    synchronize(device)
    return time.perf_counter()


def wall_seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call, from an idle device to an idle device."""
    start = idle_time(device)
    call()
    return idle_time(device) - start


def wall_samples(
    call: Callable[[], object],
    device: torch.device,
    *,
    repeats: int,
    budget_s: float,
    warming: Callable[[], bool] = lambda: False,
) -> list[float]:
    """Seconds of a call, measured `repeats` times at most, and not again when that has taken `budget_s`.

    Where `warming` says that the last call was a warm-up after all, what was measured does not count, at most four
    times.
    """
    samples: list[float] = []
    forgiven = 4
    while len(samples) < repeats and sum(samples) < budget_s:
        samples.append(wall_seconds(call, device))
        if forgiven and warming():
            samples, forgiven = [], forgiven - 1
    return samples


def time_operator(
    calls: Sequence[Callable[[], Output]], device: torch.device, *, budget_s: float = 0.06
) -> tuple[Times, Output]:
    """Seconds of one of calls that are alike but for their inputs, and what the first left behind when last timed.

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
    seconds = min(_replays(graph, 2))
    rounds = min(math.ceil(_LEAST_GRAPH_S / seconds), max(1, _MOST_LAUNCHES // len(calls)))
    if rounds > 1:
        del graph, output
        graph, output = _captured(calls, rounds)
        seconds *= rounds
    samples = _replays(graph, max(5, min(30, int(budget_s / seconds))))
    return percentiles([sample / (rounds * len(calls)) for sample in samples]), output


def _captured(calls: Sequence[Callable[[], Output]], rounds: int) -> tuple[torch.cuda.CUDAGraph, Output]:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            output = calls[0]()
            for call in calls[1:]:
                call()
    return graph, output


def _replays(graph: torch.cuda.CUDAGraph, count: int) -> list[float]:
    """Seconds of each replay; two that are not measured keep the device busy, so that no launch is waited for."""
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    graph.replay()
    graph.replay()
    events[0].record()
    for event in events[1:]:
        graph.replay()
        event.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def _time_on_cpu(calls: Sequence[Callable[[], Output]], budget_s: float) -> tuple[Times, Output]:
    output = calls[0]()
    samples: list[float] = []
    while len(samples) < 3 or (len(samples) < 20 and sum(samples) * len(calls) < budget_s):
        start = time.perf_counter()
        output = calls[0]()
        for call in calls[1:]:
            call()
        samples.append((time.perf_counter() - start) / len(calls))
    return percentiles(samples), output
