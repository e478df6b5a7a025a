"""Seconds of calls by a wall clock, from an idle device to an idle device, and their percentiles."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

import torch


class Times(NamedTuple):
    """Seconds: the median, between the 20th and the 80th percentile."""

    p20: float
    p50: float
    p80: float


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
