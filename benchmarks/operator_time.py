"""Times of operators, which are warm and find their inputs outside the L2 cache.

On CUDA, calls are captured in one graph that runs over all their input sets, which together are larger than the cache:
no launch overhead, no warm cache. Elsewhere, a wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TypeVar

import torch

from hf_fastdecode.measurement.calls import Times, percentiles

Output = TypeVar("Output")

_LEAST_GRAPH_S = 2e-3  # a replay this long makes the gap before it small
_MOST_LAUNCHES = 512


def in_us(times: Times) -> dict[str, float]:
    """Microseconds as columns of a measurement."""
    return {f"us_{name}": 1e6 * seconds for name, seconds in times._asdict().items()}


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
