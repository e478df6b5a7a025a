"""Rankers by name: the accuracy of each on one pool, for every n that is asked for."""

from __future__ import annotations

import zlib
from collections.abc import Hashable, Sequence
from typing import Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from .pool import Pool
from .top_m import pass_at_first_m, pass_at_n, pass_at_top_m
from .votes import pass_at_votes

Ranker = Literal["oracle", "mean_logp", "sum_logp", "random", "votes"]
"""Who chooses the m candidates that are run among n samples.

- ``oracle``: all n are run, which is pass@n.
- ``mean_logp``, ``sum_logp``: the highest mean, or sum, of the log-probabilities of the tokens; exact.
- ``random``: the first distinct ones in the order drawn; exact.
- ``votes``: programs whose outputs most samples agree on; a sample without outputs agrees with those of its text, so
  that where none are known, the most frequent texts win. Monte Carlo.
"""

RANKERS: Final[tuple[Ranker, ...]] = get_args(Ranker)


def pass_at_ranker(
    pool: Pool, ranker: Ranker, ns: Sequence[int], *, m: int = 3, draws: int = 1000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """The chance that one of a ranker's m candidates among n samples passes.

    Args:
        pool: The judged samples of one task.
        ranker: Who ranks.
        ns: Samples drawn, each between 1 and the pool's size.
        m: Candidates that are run; the oracle runs all.
        draws: Of the Monte Carlo estimate, for ``votes``.
        seed: Of the same, joined with the task's id.

    Returns:
        Chances and, where they are estimates, standard errors, both [len(ns)].

    Raises:
        ValueError: A number is out of these bounds, a log-probability is missing, or equal samples differ in `passed`.
    """
    if out := [n for n in ns if not 1 <= n <= len(pool.passed)]:
        raise ValueError(
            f"n must be between 1 and the {len(pool.passed)} samples of task {pool.task_id!r}, got {out[0]}; draw "
            "more samples or leave this n out"
        )
    if ranker == "votes":
        task_seed = zlib.crc32(f"{seed} {pool.task_id}".encode(errors="replace"))
        return pass_at_votes(pool.passed, _answers(pool), ns, m=m, draws=draws, seed=task_seed)
    try:
        return _exact(pool, ranker, m)[[n - 1 for n in ns]], None
    except ValueError as error:
        raise ValueError(f"task {pool.task_id!r}: {error}") from error


def _answers(pool: Pool) -> Sequence[Hashable]:
    """What samples vote for: their outputs, or their text where these are unknown.

    No sample is without a vote: a right one could lose it to a wrong one, and whether it is right is not known to who
    votes.
    """
    # Outputs that pass once and fail once, as by what a program printed, are two.
    return [
        ("text", key) if output is None else ("outputs", output, right)
        for key, output, right in zip(pool.keys, pool.outputs, pool.passed)
    ]


def _exact(pool: Pool, ranker: Ranker, m: int) -> NDArray[np.float64]:
    match ranker:
        case "oracle":
            return pass_at_n(pool.passed)
        case "random":
            return pass_at_first_m(pool.passed, pool.keys, m)
        case "mean_logp" | "sum_logp":
            scores = pool.mean_logp if ranker == "mean_logp" else pool.sum_logp
            return pass_at_top_m(pool.passed, scores, pool.keys, m)
    raise ValueError(f"the ranker must be one of {', '.join(RANKERS)}, got {ranker!r}")
