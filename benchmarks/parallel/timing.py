"""Times a call that all processes make at once."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from hf_fastdecode.measurement.calls import Times, idle_time, percentiles

from .processes import OneProcess, Processes


def time_together(
    processes: Processes | OneProcess, call: Callable[[], object], *, budget_s: float
) -> tuple[Times, bool]:
    """Seconds of a call that all processes make: of the slowest one at each percentile, and whether it was captured.

    On CUDA the call is captured in a graph, if it can be on every process; else it is made again and again, with the
    time of its launches. How often it is timed is the same on all of them.
    """
    device = processes.device
    if device.type != "cuda":
        return _slowest(processes, _wall(call, processes, budget_s)), False
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(2):  # compiles, plans, connects, and allocates what is allocated once
            call()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = _captured(call)
    captured = all(processes.gathered(graph is not None))
    again = graph.replay if captured and graph is not None else call
    times = _by_events(again, processes, budget_s)
    del again
    if graph is not None:
        torch.cuda.synchronize(device)
        graph.reset()
    return _slowest(processes, times), captured


def _captured(call: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    try:
        # The communication library's own thread calls CUDA meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            call()
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph


def _by_events(again: Callable[[], object], processes: Processes | OneProcess, budget_s: float) -> list[float]:
    def replays(count: int) -> list[float]:
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        again()  # while it runs, the next ones are launched
        for event in events[:-1]:
            event.record()
            again()
        events[-1].record()
        torch.cuda.synchronize()
        return [events[index].elapsed_time(events[index + 1]) / 1e3 for index in range(count)]

    return replays(_count(processes, min(replays(3)), budget_s))


def _wall(call: Callable[[], object], processes: Processes | OneProcess, budget_s: float) -> list[float]:
    def once() -> float:
        processes.gathered(None)
        start = idle_time(processes.device)
        call()
        return idle_time(processes.device) - start

    once()
    return [once() for _ in range(_count(processes, once(), budget_s, least=3))]


def _count(processes: Processes | OneProcess, seconds: float, budget_s: float, least: int = 5) -> int:
    slowest = max(processes.gathered(seconds))
    return max(least, min(40, math.ceil(budget_s / slowest)))


def _slowest(processes: Processes | OneProcess, samples: list[float]) -> Times:
    return Times(*map(max, zip(*processes.gathered(tuple(percentiles(samples))), strict=True)))
