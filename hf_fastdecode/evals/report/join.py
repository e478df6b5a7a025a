"""Accuracy against latency: the two are measured apart, and joined by n only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..metrics import Ranker
from ..records import Latency, Mode, Way
from .accuracy import Accuracy


@dataclass(frozen=True)
class Line:
    """Latency against n, in one way and mode on one device: the measurements with numbers, by n."""

    device: str
    way: Way
    mode: Mode
    rows: tuple[Latency, ...]

    @property
    def label(self) -> str:
        """The line's name in tables and pictures."""
        name = "hf_fastdecode" if self.way == "shared" else "transformers"
        return f"{name}, {self.mode}"

    def at(self, n: int) -> Latency | None:
        """The row of n samples."""
        return next((row for row in self.rows if row.n == n), None)


@dataclass(frozen=True)
class Step:
    """The best accuracy within a budget: what the n that gives it takes, and gives."""

    seconds: float
    n: int
    value: float


def lines_of(rows: Iterable[Latency]) -> list[Line]:
    """The lines of the rows that have numbers, in the order of the rows."""
    found: dict[tuple[str, Way, Mode], list[Latency]] = {}
    for row in rows:
        if row.status == "ok":
            found.setdefault((row.device, row.way, row.mode), []).append(row)
    return [Line(*key, tuple(sorted(own, key=lambda row: row.n))) for key, own in found.items()]


def fastest(lines: Iterable[Line], way: Way, device: str) -> Line | None:
    """The line of a way on a device that reaches the largest n, and of several the fastest there."""
    own = [line for line in lines if (line.way, line.device) == (way, device)]
    return min(own, key=lambda line: (-line.rows[-1].n, line.rows[-1].last_sample_s), default=None)


def points(accuracy: Accuracy, ranker: Ranker, line: Line) -> list[tuple[int, float, float]]:
    """n, seconds until the last of n samples, and accuracy, for each n that has both."""
    return [(row.n, row.last_sample_s, accuracy.value(ranker, row.n)) for row in line.rows if row.n in accuracy.ns]


def accuracy_within(accuracy: Accuracy, ranker: Ranker, line: Line) -> list[Step]:
    """The best accuracy within a time budget, as steps: of all n whose last sample is there in time, the best."""
    steps: list[Step] = []
    for n, seconds, value in sorted(points(accuracy, ranker, line), key=lambda point: point[1]):
        if not steps or value > steps[-1].value:
            steps.append(Step(seconds, n, value))
    return steps


def largest_n_within(line: Line, factor: float = 2.0) -> int | None:
    """The largest n that takes at most `factor` times the latency of n = 1; None where n = 1 was not measured."""
    one = line.at(1)
    if one is None:
        return None
    return max(row.n for row in line.rows if row.last_sample_s <= factor * one.last_sample_s)
