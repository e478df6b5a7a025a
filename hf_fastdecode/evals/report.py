"""The report of a run folder: accuracy over tasks, and latency, which are measured separately and joined by n only."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final, Self, get_args

import numpy as np

from ..errors import InputError
from ..files import read_rows
from .metrics import RANKERS, Deduplicate, Pool, Ranker, bootstrap_interval, build_pools, pass_at_ranker, powers_of_two
from .records import Latency, Mode, Sample, Verdict, Way, read_samples, read_verdicts, thoughts_line
from .run_folder import LATENCY, SAMPLES, SETTINGS, VERDICTS

SHOWN: Final[tuple[Ranker, ...]] = ("oracle", "mean_logp")
"""The curves that are set against latency: pass@n and pass@top-m."""


@dataclass(frozen=True)
class Curve:
    """Accuracy of a ranker against n: means over tasks, for each n of the `Accuracy`."""

    ranker: Ranker  # who chooses the candidates that are run
    values: tuple[float, ...]
    lows: tuple[float, ...]  # of the 95 % bootstrap interval over tasks; NaN with a single task
    highs: tuple[float, ...]
    errors: tuple[float, ...] | None = None  # standard errors of Monte Carlo estimates; None for exact values


@dataclass(frozen=True)
class TaskCounts:
    """The pool of one task: judged samples, those that passed, groups of duplicates, and groups that pass."""

    task_id: str
    samples: int
    passed: int
    distinct: int
    distinct_passed: int


@dataclass(frozen=True)
class Accuracy:
    """Accuracy of the judged samples."""

    m: int | None  # candidates that are run; None where samples were not ranked
    ns: tuple[int, ...]  # numbers of samples
    curves: dict[Ranker, Curve]  # `oracle` is pass@n
    tasks: tuple[TaskCounts, ...]
    statuses: dict[str, int]  # verdicts by status, of all samples
    at_most: Curve | None = None  # pass@n if all unjudged samples were right; None where none is unjudged

    def label(self, ranker: Ranker) -> str:
        return {
            "oracle": "pass@n",
            "mean_logp": f"pass@top{self.m}, mean log-p",
            "sum_logp": f"pass@top{self.m}, sum log-p",
            "random": f"first {self.m} distinct, unranked",
            "votes": f"majority vote, top {self.m}",
        }[ranker]

    def short_label(self, ranker: Ranker) -> str:
        """The paper's name of a curve of `SHOWN`."""
        return "pass@n" if ranker == "oracle" else f"pass@top{self.m}"

    def value(self, ranker: Ranker, n: int) -> float:
        return self.curves[ranker].values[self.ns.index(n)]


def _curve(ranker: Ranker, pools: Sequence[Pool], ns: Sequence[int], m: int | None, seed: int) -> Curve:
    found = [pass_at_ranker(pool, ranker, ns, m=m or 1, seed=seed) for pool in pools]
    values = np.array([value for value, _ in found])  # [tasks, ns]
    squares = [error**2 for _, error in found if error is not None]
    errors = np.sqrt(np.sum(squares, axis=0)) / len(pools) if squares else None
    intervals = bootstrap_interval(values, seed=seed)
    means, lows, highs = (tuple(row.tolist()) for row in (values.mean(axis=0), *intervals))
    return Curve(ranker, means, lows, highs, None if errors is None else tuple(errors.tolist()))


_COUNTS: Final = ("n", "peak_bytes", "runs")
_SECONDS: Final = tuple(field.name for field in fields(Latency) if field.default is math.nan)
_SUBJECT: Final = ("model", "dtype", "task")


def read_latency(path: Path) -> tuple[Latency, ...]:
    """The rows of ``latency.csv``, sorted by device, way, mode and n; an InputError for a file of another kind.

    The column ``way`` is ``stock``, ``shared``, or ``shared:MODE`` where a mode was asked for by name. Where two ways
    ran in the same mode, the later row with measurements counts.
    """
    try:
        found = [_latency_row(line) for line in read_rows(path)]
    except (KeyError, ValueError) as error:  # of the encoding too
        raise InputError(f"{path} is not a table of `eval latency` ({error}); remove it and time again") from error
    ways, modes = get_args(Way), get_args(Mode)
    rows: dict[tuple[Any, ...], Latency] = {}
    for row in found:
        key = row.device, ways.index(row.way), modes.index(row.mode), row.n
        if row.status == "ok" or key not in rows:
            rows[key] = row
    return tuple(rows[key] for key in sorted(rows))


def _latency_row(line: Mapping[str, str]) -> Latency:
    values: dict[str, Any] = {name: line[name] for name in ("way", "mode", "device")}
    values |= {"way": values["way"].partition(":")[0], "status": line.get("status") or "ok"}
    for name in (*_COUNTS, *_SECONDS):
        if line.get(name):
            values[name] = int(line[name]) if name in _COUNTS else float(line[name])
    row = Latency(n=values.pop("n"), **values)
    if row.way not in get_args(Way) or row.mode not in get_args(Mode) or row.n < 1:
        raise ValueError(f"no way, mode and number of samples: {row.way}, {row.mode}, {row.n}")
    if row.status == "ok" and not 0 < row.last_sample_s < math.inf:
        raise ValueError(f"last_sample_s is {row.last_sample_s} at n = {row.n}")
    return row


@dataclass(frozen=True)
class Line:
    """Latency against n, in one way and mode on one device: the successful measurements, by n."""

    device: str
    way: Way
    mode: Mode
    rows: tuple[Latency, ...]

    @property
    def label(self) -> str:
        name = "hf_fastdecode" if self.way == "shared" else "transformers"
        return f"{name}, {self.mode}"

    def at(self, n: int) -> Latency | None:
        return next((row for row in self.rows if row.n == n), None)


@dataclass(frozen=True)
class Step:
    seconds: float
    n: int
    value: float


def lines_of(rows: Iterable[Latency]) -> list[Line]:
    found: dict[tuple[str, Way, Mode], list[Latency]] = {}
    for row in rows:
        if row.status == "ok":
            found.setdefault((row.device, row.way, row.mode), []).append(row)
    return [Line(*key, tuple(sorted(group, key=lambda row: row.n))) for key, group in found.items()]


def fastest(lines: Iterable[Line], way: Way, device: str) -> Line | None:
    """Return the line of a way on a device that reaches the largest n, and of several the fastest there."""
    reached = [line for line in lines if (line.way, line.device) == (way, device)]
    return min(reached, key=lambda line: (-line.rows[-1].n, line.rows[-1].last_sample_s), default=None)


def points(accuracy: Accuracy, ranker: Ranker, line: Line) -> list[tuple[int, float, float]]:
    """Return n, seconds until the last of n samples, and accuracy, for each n that has both."""
    return [(row.n, row.last_sample_s, accuracy.value(ranker, row.n)) for row in line.rows if row.n in accuracy.ns]


def accuracy_within(accuracy: Accuracy, ranker: Ranker, line: Line) -> list[Step]:
    """Return the steps of the best accuracy within a time budget, of all n whose last sample is there in time."""
    steps: list[Step] = []
    for n, seconds, value in sorted(points(accuracy, ranker, line), key=lambda point: point[1]):
        if not steps or value > steps[-1].value:
            steps.append(Step(seconds, n, value))
    return steps


def largest_n_within(line: Line, factor: float = 2.0) -> int | None:
    """Return the largest n of at most `factor` times the latency of n = 1; None where n = 1 was not measured."""
    one = line.at(1)
    if one is None:
        return None
    return max(row.n for row in line.rows if row.last_sample_s <= factor * one.last_sample_s)


@dataclass(frozen=True)
class Report:
    """Accuracy and latency of a run folder."""

    settings: dict[str, Any]  # of the report, and those of the run where settings.json has them
    accuracy: Accuracy | None  # None where no sample was judged
    latency: tuple[Latency, ...]  # rows of latency.csv; none where nothing was timed
    notes: tuple[str, ...]  # what a reader must know to trust the numbers, one sentence each

    @property
    def lines(self) -> list[Line]:
        return lines_of(self.latency)

    @property
    def title(self) -> str:
        run = self.settings["run"]
        parts = [f"{name} {run[name]}" for name in ("model", "task") if run.get(name)]
        if self.accuracy is not None:
            fewest = min(task.samples for task in self.accuracy.tasks)
            parts.append(f"{plural(len(self.accuracy.tasks), 'task')}, {fewest:,} samples of each")
        return "; ".join(parts) or "latency"


def report(
    folder: Path,
    *,
    m: int | None = 3,
    ks: Sequence[int] | None = None,
    seed: int = 0,
    deduplicate: Deduplicate = "text",
) -> Report:
    """Read a run folder and compute everything that is shown of it.

    Each of its files may be missing: ``samples.jsonl`` and ``verdicts.jsonl`` (without verdicts, latency only),
    ``latency.csv`` (without it, accuracy only), and ``settings.json``, whose ``model`` and ``task`` stand in titles. A
    ranking may run `m` candidates; without `m` there are no rankings, as for samples without log-probabilities. By
    default `ks` are the powers of two up to the smallest pool, its size, and the n that were timed. An InputError says
    what is missing or wrong.
    """
    if m is not None and m < 1:
        raise InputError(f"m must be at least 1, got {m}; it counts the candidates that are run")
    latency = read_latency(folder / LATENCY) if (folder / LATENCY).exists() else ()
    notes: list[str] = []
    accuracy = None
    if (folder / VERDICTS).exists():
        judged = _Judged.read(folder, deduplicate)
        notes += judged.notes(ranked=m is not None)
        accuracy = judged.accuracy(m, judged.ns(ks, [row.n for row in latency]), seed)
    elif not latency:
        raise InputError(
            f"{folder} has neither {VERDICTS} nor {LATENCY}; sample and score a task first, or name another folder"
        )
    notes += _failures(latency)
    about = read_rows(folder / LATENCY)[0] if latency else {}
    settings = {
        "m": m,
        "seed": seed,
        "deduplicate": deduplicate,
        "interval": "95 % percentile bootstrap over tasks, 10,000 resamples",
        "run": _run_settings(folder / SETTINGS) or {name: about[name] for name in _SUBJECT if about.get(name)},
    }
    return Report(settings, accuracy, latency, tuple(notes))


@dataclass(frozen=True)
class _Judged:
    folder: Path
    deduplicate: Deduplicate
    samples: list[Sample]
    verdicts: list[Verdict]  # the last of each sample
    pools: list[Pool]  # settled
    left_out: int  # samples without a verdict
    flips: int  # verdicts that settling changed

    @classmethod
    def read(cls, folder: Path, deduplicate: Deduplicate) -> Self:
        if not (folder / SAMPLES).exists():
            raise InputError(f"{folder} has {VERDICTS} but not {SAMPLES}; put the samples that were scored beside it")
        samples, verdicts = read_samples(folder / SAMPLES), read_verdicts(folder / VERDICTS)
        try:
            pools, left_out = build_pools(samples, verdicts, deduplicate)
        except ValueError as error:
            raise InputError(f"{folder}: {error}") from error
        if not pools:
            raise InputError(
                f"{folder}: none of {len(samples)} samples has a verdict; score them, or remove {VERDICTS} to report "
                "on latency only"
            )
        last = {(verdict.task_id, verdict.index): verdict for verdict in verdicts}
        settled = [pool.settle() for pool in pools]
        flips = sum(changed for _, changed in settled)
        return cls(folder, deduplicate, samples, [*last.values()], [pool for pool, _ in settled], left_out, flips)

    @property
    def sizes(self) -> list[int]:
        return [len(pool.passed) for pool in self.pools]

    def ns(self, ks: Sequence[int] | None, timed: Sequence[int]) -> list[int]:
        fewest = min(self.sizes)
        if ks is None:
            return sorted({*powers_of_two(fewest), *(n for n in timed if n <= fewest)})
        if out := [k for k in ks if not 1 <= k <= fewest]:
            raise InputError(
                f"n must be between 1 and the {fewest} judged samples of the smallest pool, got {out[0]}; draw more "
                "samples or leave it out"
            )
        return sorted(set(ks))

    def accuracy(self, m: int | None, ns: Sequence[int], seed: int) -> Accuracy:
        if m is not None and (unknown := sum(score is None for pool in self.pools for score in pool.mean_logp)):
            raise InputError(
                f"{self.folder / SAMPLES}: pass@top{m} ranks by log-probabilities, which {unknown:,} of "
                f"{sum(self.sizes):,} judged samples lack; have the model score them, or leave rankings out"
            )
        curves = {
            ranker: _curve(ranker, self.pools, ns, m, seed) for ranker in (RANKERS[:1] if m is None else RANKERS)
        }
        statuses = dict(Counter[str](verdict.status for verdict in self.verdicts).most_common())
        at_most = None
        if "unjudged" in statuses:
            right = [replace(one, status="pass") if one.status == "unjudged" else one for one in self.verdicts]
            best = [pool.settle()[0] for pool in build_pools(self.samples, right, self.deduplicate)[0]]
            at_most = _curve("oracle", best, ns, m, seed)
        counts = []
        for pool in self.pools:
            right_keys = {key for key, right in zip(pool.keys, pool.passed) if right}
            counts.append(
                TaskCounts(pool.task_id, len(pool.passed), sum(pool.passed), len(set(pool.keys)), len(right_keys))
            )
        return Accuracy(m, tuple(ns), curves, tuple(counts), statuses, at_most)

    def notes(self, *, ranked: bool) -> list[str]:
        notes = []
        least, most = min(self.sizes), max(self.sizes)
        if self.left_out:
            lost = len({sample.task_id for sample in self.samples}) - len(self.pools)
            notes.append(
                f"{self.left_out:,} of {len(self.samples):,} samples have no verdict and are left out"
                + (f", and with them {plural(lost, 'task')}" if lost else "")
            )
        if least < most:
            notes.append(f"Tasks have between {least:,} and {most:,} judged samples; n goes up to {least:,}")
        if len(self.pools) == 1:
            notes.append("A single task gives no interval over tasks.")
        if self.flips:
            notes.append(
                f"Equal samples have different verdicts, so the scoring is flaky; {self.flips:,} were changed to "
                "those of the majority, a tie counting as failed"
            )
        notes += filter(None, [thoughts_line(self.samples), "" if ranked else "Samples were not ranked."])
        if unjudged := [verdict.task_id for verdict in self.verdicts if verdict.status == "unjudged"]:
            notes.append(
                f"{len(unjudged):,} samples of {plural(len(set(unjudged)), 'task')} cannot be judged: they count as "
                "failed, and in the column 'at most' as passed"
            )
        return notes


def plural(count: int, name: str) -> str:
    return f"{count:,} {name}{'' if count == 1 else 's'}"


def _failures(latency: Sequence[Latency]) -> list[str]:
    found: dict[str, list[str]] = {}
    for row in latency:
        if row.status != "ok":
            found.setdefault(f"{row.way}, {row.mode} on {row.device}: {row.status}", []).append(f"{row.n:,}")
    return [f"{cause} at n = {', '.join(ns)}" for cause, ns in found.items()]


def _run_settings(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON: {error}; mend or remove it") from error
    if not isinstance(found, dict):
        raise InputError(f"{path} must hold a JSON object, got a {type(found).__name__}; mend or remove it")
    return found
