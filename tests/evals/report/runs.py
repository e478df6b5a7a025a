"""Run folders made up for tests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

from hf_fastdecode.evals.records import Latency, Sample, Verdict
from hf_fastdecode.evals.run_folder import LATENCY, SAMPLES, SETTINGS, VERDICTS
from hf_fastdecode.files import JsonlWriter, write_rows

CPU = "x86_64 CPU, 2 threads"

# (text, mean log-probability, passed) of each sample, best first: "a" is right but comes second, "c" right and last.
TASKS = {
    "<script>alert(1)</script>": [("b", -1.0, False), ("a", -2.0, True), ("a", -2.5, True), ("d", -3.0, False)],
    "MBPP/2": [("x", -0.5, True), ("y", -1.0, False), ("y", -1.5, False), ("z", -2.0, False)],
    "MBPP/3": [("x", -0.5, False), ("y", -1.0, False), ("y", -1.5, False), ("z", -2.0, False)],
}


def samples(tasks=None) -> list[Sample]:
    return [
        Sample(task_id, index, text, tokens=4, sum_logp=4 * mean_logp)
        for task_id, rows in (tasks or TASKS).items()
        for index, (text, mean_logp, _) in enumerate(rows)
    ]


def verdicts(tasks=None) -> list[Verdict]:
    return [
        Verdict(task_id, index, "pass" if passed else "fail")
        for task_id, rows in (tasks or TASKS).items()
        for index, (_, _, passed) in enumerate(rows)
    ]


def latency(ns: Sequence[int] = (1, 2, 4, 8), device: str = CPU, modes: Sequence[str] = ("eager",)) -> list[Latency]:
    """Shared takes 1 s and 0.05 s a sample, in further modes less; stock 0.5 s more a sample, and fails at n = 8."""
    rows = []
    for n in ns:
        for place, mode in enumerate(modes):
            seconds = (1 + 0.05 * n) / (place + 1)
            rows.append(Latency("shared", mode, n, device, 0.25, 10.0 * n, last_sample_s=seconds, runs=5))
        seconds = 1 + 0.55 * n
        stock = Latency("stock", "eager", n, device, 0.25, 20.0 * n, 25.0 * n, last_sample_s=seconds, runs=5)
        rows.append(stock if n < 8 else Latency("stock", "eager", n, device, status="out of memory"))
    return rows


def write_latency(path: Path, rows: Iterable[Latency], **more: str) -> None:
    """Write rows as `hf_fastdecode.measurement.rows` does."""
    known = [{name: None if value != value else value for name, value in asdict(row).items()} for row in rows]
    write_rows(path, [own | more for own in known])


def write_run(
    folder: Path,
    *,
    samples: Iterable[Sample] | None = None,
    verdicts: Iterable[Verdict] | None = None,
    latency: Iterable[Latency] | None = None,
    settings: object = None,
) -> Path:
    """Write the files that are given."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, records in ((SAMPLES, samples), (VERDICTS, verdicts)):
        if records is not None:
            with JsonlWriter(folder / name) as writer:
                writer.write(records)
    if latency is not None:
        write_latency(folder / LATENCY, latency)
    if settings is not None:
        (folder / SETTINGS).write_text(json.dumps(settings))
    return folder


def full_run(folder: Path) -> Path:
    """Accuracy, latency and settings."""
    settings = {"model": "m & <i>n</i>", "task": "mbpp", "temperature": 0.8}
    return write_run(folder, samples=samples(), verdicts=verdicts(), latency=latency(), settings=settings)
