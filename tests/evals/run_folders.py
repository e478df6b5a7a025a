"""Run folders and pools made up for tests, and the metrics by enumeration of every subset."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from fractions import Fraction
from itertools import combinations, permutations
from math import comb
from pathlib import Path

from hypothesis import strategies as st

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


Columns = tuple[list[bool], list[float], list[int]]
"""passed, scores and keys of the samples of one task."""


@st.composite
def pools(draw: st.DrawFn, most: int = 8) -> Columns:
    """Pools of few samples in few groups, whose scores are few, so that duplicates and ties are frequent."""
    right = draw(st.lists(st.booleans(), min_size=1, max_size=6))
    keys = draw(st.lists(st.integers(0, len(right) - 1), min_size=1, max_size=most))
    score = st.sampled_from([-float("inf"), -2.0, -1.5, -1.0, -0.25])
    return [right[key] for key in keys], draw(st.lists(score, min_size=len(keys), max_size=len(keys))), keys


def mean_over_subsets(samples: int, value: Callable[[Sequence[int]], Fraction | bool]) -> list[float]:
    """For n = 1..N the mean of a value over all subsets of n of N samples."""
    return [
        float(sum((Fraction(value(chosen)) for chosen in combinations(range(samples), n)), Fraction()))
        / comb(samples, n)
        for n in range(1, samples + 1)
    ]


def top_m_by_hand(columns: Columns, m: int) -> list[float]:
    """pass@top-m: deduplicate each subset, rank its candidates, run m of them."""
    passed, scores, keys = columns

    def value(chosen: Sequence[int]) -> bool:
        candidates = {key: [index for index in chosen if keys[index] == key] for key in {keys[i] for i in chosen}}
        ranks = {key: min((-scores[i], passed[i]) for i in members) for key, members in candidates.items()}
        run = sorted(ranks, key=ranks.__getitem__)[:m]
        return any(passed[candidates[key][0]] for key in run)

    return mean_over_subsets(len(keys), value)


def first_m_by_hand(columns: Columns, m: int) -> list[float]:
    """The first m distinct samples, over every order of every subset."""
    passed, _, keys = columns

    def value(chosen: Sequence[int]) -> Fraction:
        orders = list(permutations(chosen))
        found = 0
        for order in orders:
            distinct = list(dict.fromkeys(keys[index] for index in order))[:m]
            found += any(passed[index] for index in chosen if keys[index] in distinct)
        return Fraction(found, len(orders))

    return mean_over_subsets(len(keys), value)


def votes_by_hand(passed: Sequence[bool], outputs: Sequence[int], m: int) -> list[float]:
    """The m most frequent outputs, over every order of the outputs that tie."""

    def value(chosen: Sequence[int]) -> Fraction:
        votes = Counter(outputs[index] for index in chosen)
        right = {outputs[index] for index in chosen if passed[index]}
        orders = [
            sorted(order, key=lambda output: -votes[output])[:m]  # stable: ties stay in the order given
            for order in permutations(votes)
        ]
        return Fraction(sum(bool(right & set(order)) for order in orders), len(orders))

    return mean_over_subsets(len(passed), value)
