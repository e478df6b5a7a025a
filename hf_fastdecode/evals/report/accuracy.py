"""Accuracy over tasks: a curve over n for each ranker, with intervals over problems."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from ..metrics import Pool, Ranker, bootstrap_interval, pass_at_ranker

SHOWN: Final[tuple[Ranker, ...]] = ("oracle", "mean_logp")
"""The curves that are set against latency: pass@n and pass@top-m."""


@dataclass(frozen=True)
class Curve:
    """Accuracy of one ranker against n: means over tasks, one for each n of the `Accuracy`."""

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
    """What the samples and their verdicts say."""

    m: int | None  # candidates that are run; None where samples were not ranked
    ns: tuple[int, ...]  # numbers of samples
    curves: dict[Ranker, Curve]  # `oracle` is pass@n
    tasks: tuple[TaskCounts, ...]
    statuses: dict[str, int]  # verdicts by status, of all samples
    at_most: Curve | None = None  # pass@n if all unjudged samples were right; None where none is unjudged

    def label(self, ranker: Ranker) -> str:
        """A curve's name in tables and pictures."""
        return {
            "oracle": "pass@n",
            "mean_logp": f"pass@top{self.m}, mean log-p",
            "sum_logp": f"pass@top{self.m}, sum log-p",
            "random": f"first {self.m} distinct, unranked",
            "votes": f"majority vote, top {self.m}",
        }[ranker]

    def short_label(self, ranker: Ranker) -> str:
        """The name of a curve of `SHOWN`, as the paper has it."""
        return "pass@n" if ranker == "oracle" else f"pass@top{self.m}"

    def value(self, ranker: Ranker, n: int) -> float:
        """Accuracy of a ranker at one of the ns."""
        return self.curves[ranker].values[self.ns.index(n)]


def measure_accuracy(
    pools: Sequence[Pool],
    rankers: Sequence[Ranker],
    ns: Sequence[int],
    *,
    m: int | None,
    statuses: Counter[str],
    seed: int = 0,
    best: Sequence[Pool] | None = None,
) -> Accuracy:
    """Curves of rankers at numbers of samples, over the tasks of some pools, at least one; of `best` pools, in which
    unjudged samples have passed, that of pass@n.
    """

    def curve(ranker: Ranker, pools: Sequence[Pool]) -> Curve:
        found = [pass_at_ranker(pool, ranker, ns, m=m or 1, seed=seed) for pool in pools]
        values = np.array([value for value, _ in found])  # [tasks, ns]
        lows, highs = bootstrap_interval(values, seed=seed)
        squares = [error**2 for _, error in found if error is not None]
        errors = np.sqrt(np.sum(squares, axis=0)) / len(pools) if squares else None
        return Curve(
            ranker,
            tuple(values.mean(axis=0).tolist()),
            tuple(lows.tolist()),
            tuple(highs.tolist()),
            None if errors is None else tuple(errors.tolist()),
        )

    counts = tuple(
        TaskCounts(
            pool.task_id,
            len(pool.passed),
            pool.correct,
            pool.distinct,
            len({key for key, right in zip(pool.keys, pool.passed) if right}),
        )
        for pool in pools
    )
    curves = {ranker: curve(ranker, pools) for ranker in rankers}
    at_most = None if best is None else curve("oracle", best)
    return Accuracy(m, tuple(ns), curves, counts, dict(statuses.most_common()), at_most)
