"""pass@k of one problem, and confidence intervals over problems."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pass_at_k(n: int, c: int, k: int) -> float:
    """The probability that at least one of k samples passes, estimated from n samples of which c passed.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: ``1 - C(n - c, k) / C(n, k)``, in
    the numerically stable product form of its figure 3, ``1 - prod_{i = n - c + 1}^{n} (1 - k / i)``.

    Args:
        n: Samples drawn, at least k.
        c: Samples that passed, between 0 and n.
        k: Samples a user would look at, at least 1.

    Raises:
        ValueError: An argument is out of these bounds.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}; pass@k counts the samples that are looked at")
    if n < k:
        raise ValueError(f"n must be at least k, got n = {n} < k = {k}; draw more samples or lower k")
    if not 0 <= c <= n:
        raise ValueError(f"c must be between 0 and n = {n}, got {c}; c counts the passing samples among the n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def bootstrap_interval(
    values: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The percentile interval of the mean over problems.

    Problems are drawn with replacement, and the samples of a problem stay together. All columns of `values` are
    resampled alike, so that intervals of one call can be compared.

    Args:
        values: [problems] or [problems, columns], such as pass@n of each problem for several n.
        level: Share of the resampled means inside the interval, between 0 and 1.
        resamples: Number of resamplings, at least 1.
        seed: For the resampling.

    Returns:
        Lower and upper ends, [columns] each (no dimension for one column). NaN for a single problem, which says
        nothing about how problems differ.

    Raises:
        ValueError: There are no problems, or a number is out of these bounds.
    """
    table = np.asarray(values, dtype=np.float64)
    if not table.ndim or not len(table):
        raise ValueError("an interval over problems needs at least one problem, got none")
    if not 0 < level < 1:
        raise ValueError(f"level must be between 0 and 1, got {level}; 0.95 is usual")
    if resamples < 1:
        raise ValueError(f"resamples must be at least 1, got {resamples}; 10000 are usual")
    problems = len(table)
    if problems == 1:
        unknown = np.full(table.shape[1:], np.nan)
        return unknown, unknown.copy()
    generator = np.random.default_rng(seed)
    means = np.empty((resamples, *table.shape[1:]))
    for start in range(0, resamples, 1000):  # in parts, for memory
        part = means[start : start + 1000]
        part[:] = generator.multinomial(problems, [1 / problems] * problems, size=len(part)) @ table / problems
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high
