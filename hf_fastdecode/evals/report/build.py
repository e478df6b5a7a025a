"""The report of a run folder, from the files that sampling, scoring and timing left there."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...errors import InputError
from ..metrics import RANKERS, Pool, Ranker, build_pools, powers_of_two
from ..metrics.pool import Deduplicate
from ..records import Latency, read_samples, read_verdicts, thoughts_line
from ..run_folder import LATENCY, SAMPLES, SETTINGS, VERDICTS
from .accuracy import Accuracy, measure_accuracy
from .join import Line, lines_of
from .latency import read_latency, read_subject


@dataclass(frozen=True)
class Report:
    """What a run folder shows."""

    settings: dict[str, Any]  # of the report, and those of the run where settings.json has them
    accuracy: Accuracy | None  # None where no sample was judged
    latency: tuple[Latency, ...]  # rows of latency.csv; none where nothing was timed
    notes: tuple[str, ...]  # what a reader must know to trust the numbers, one sentence each

    @property
    def lines(self) -> list[Line]:
        """Latency against n, a line for each way, mode and device."""
        return lines_of(self.latency)

    @property
    def title(self) -> str:
        """What was evaluated, in a line."""
        run = self.settings["run"]
        parts = [f"{name} {run[name]}" for name in ("model", "task") if run.get(name)]
        if self.accuracy is not None:
            fewest = min(task.samples for task in self.accuracy.tasks)
            tasks = len(self.accuracy.tasks)
            parts.append(f"{tasks:,} task{'' if tasks == 1 else 's'}, {fewest:,} samples of each")
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

    Files of the folder, each of which may be missing:

    - ``samples.jsonl`` and ``verdicts.jsonl``: `Sample` and `Verdict` as JSON lines; without verdicts, latency only.
    - ``latency.csv``: rows of `Latency`; without it, accuracy only.
    - ``settings.json``: an object with the settings of the run; ``model`` and ``task`` stand in titles.

    A ranking may run `m` candidates; without `m` there are no rankings, as for samples without log-probabilities. By
    default `ks` are the powers of two up to the smallest pool, its size, and the n that were timed. An InputError says
    what is missing or wrong.
    """
    if m is not None and m < 1:
        raise InputError(f"m must be at least 1, got {m}; it counts the candidates that are run")
    latency = read_latency(folder / LATENCY) if (folder / LATENCY).exists() else ()
    notes: list[str] = []
    accuracy = None
    if (folder / VERDICTS).exists():
        accuracy = _accuracy(folder, m, ks, [row.n for row in latency], seed, deduplicate, notes)
    elif not latency:
        raise InputError(
            f"{folder} has neither {VERDICTS} nor {LATENCY}; sample and score a task first, or name another folder"
        )
    notes += _failures(latency)
    settings = {
        "m": m,
        "seed": seed,
        "deduplicate": deduplicate,
        "interval": "95 % percentile bootstrap over tasks, 10,000 resamples",
        "run": _run_settings(folder / SETTINGS) or (read_subject(folder / LATENCY) if latency else {}),
    }
    return Report(settings, accuracy, latency, tuple(notes))


def _accuracy(
    folder: Path,
    m: int | None,
    ks: Sequence[int] | None,
    timed: Sequence[int],
    seed: int,
    deduplicate: Deduplicate,
    notes: list[str],
) -> Accuracy:
    """Accuracy of the judged samples; what is remarkable about them is added to the notes."""
    if not (folder / SAMPLES).exists():
        raise InputError(f"{folder} has {VERDICTS} but not {SAMPLES}; put the samples that were scored beside it")
    samples, verdicts = read_samples(folder / SAMPLES), read_verdicts(folder / VERDICTS)
    try:
        pools, left_out = build_pools(samples, verdicts, deduplicate)
    except ValueError as error:
        raise InputError(f"{folder}: {error}") from error
    if not pools:
        raise InputError(
            f"{folder}: none of {len(samples)} samples has a verdict; score them, or remove {VERDICTS} to report on "
            "latency only"
        )
    notes += _remarks(samples_of=Counter(sample.task_id for sample in samples), pools=pools, left_out=left_out)
    settled = [pool.settle() for pool in pools]
    pools = [pool for pool, _ in settled]
    if flips := sum(changed for _, changed in settled):
        notes.append(
            f"Equal samples have different verdicts, so the scoring is flaky; {flips:,} were changed to those of the "
            "majority, a tie counting as failed"
        )
    if said := thoughts_line(samples):
        notes.append(said)
    fewest = min(len(pool.passed) for pool in pools)
    rankers: list[Ranker] = ["oracle"] if m is None else list(RANKERS)
    if m is None:
        notes.append("Samples were not ranked.")
    elif unknown := sum(score is None for pool in pools for score in pool.mean_logp):
        raise InputError(
            f"{folder / SAMPLES}: pass@top{m} ranks by log-probabilities, which {unknown:,} of "
            f"{sum(len(pool.passed) for pool in pools):,} judged samples lack; have the model score them, or leave "
            "rankings out"
        )
    if ks is not None and (out := [k for k in ks if not 1 <= k <= fewest]):
        raise InputError(
            f"n must be between 1 and the {fewest} judged samples of the smallest pool, got {out[0]}; draw more "
            "samples or leave it out"
        )
    ns = sorted(set(ks)) if ks is not None else sorted({*powers_of_two(fewest), *(n for n in timed if n <= fewest)})
    last = {(verdict.task_id, verdict.index): verdict for verdict in verdicts}
    statuses = Counter[str](verdict.status for verdict in last.values())
    best = None
    if unjudged := statuses["unjudged"]:
        right = [replace(one, status="pass") if one.status == "unjudged" else one for one in last.values()]
        best = [pool.settle()[0] for pool in build_pools(samples, right, deduplicate)[0]]
        tasks = len({one.task_id for one in last.values() if one.status == "unjudged"})
        notes.append(
            f"{unjudged:,} samples of {tasks:,} task{'' if tasks == 1 else 's'} cannot be judged: they count as "
            "failed, and in the column 'at most' as passed"
        )
    return measure_accuracy(pools, rankers, ns, m=m, statuses=statuses, seed=seed, best=best)


def _remarks(*, samples_of: Counter[str], pools: Sequence[Pool], left_out: int) -> list[str]:
    remarks = []
    if left_out:
        lost = len(samples_of) - len(pools)
        remarks.append(
            f"{left_out:,} of {samples_of.total():,} samples have no verdict and are left out"
            + (f", and with them {lost:,} task{'' if lost == 1 else 's'}" if lost else "")
        )
    sizes = [len(pool.passed) for pool in pools]
    if min(sizes) < max(sizes):
        remarks.append(
            f"Tasks have between {min(sizes):,} and {max(sizes):,} judged samples; n goes up to {min(sizes):,}"
        )
    if len(pools) == 1:
        remarks.append("A single task gives no interval over tasks.")
    return remarks


def _failures(latency: Sequence[Latency]) -> list[str]:
    """Measurements without numbers, a sentence for each cause."""
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
