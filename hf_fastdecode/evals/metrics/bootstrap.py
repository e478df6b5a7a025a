"""Bootstrap confidence intervals over problems."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray


def bootstrap_interval(
    values: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The percentile interval of the mean over problems.

    Problems are drawn again with replacement, whole: the samples of a problem stay together. All columns of `values`
    are resampled alike, so that intervals of one call can be compared.

    Args:
        values: [problems] or [problems, columns], such as pass@n of each problem for several n.
        level: Share of the resampled means inside the interval, between 0 and 1.
        resamples: Times that problems are drawn again, at least 1.
        seed: Of the draws.

    Returns:
        Lower and upper ends, [columns] each (no dimension for one column). NaN for a single problem: nothing is known
        of how problems differ.

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
