"""Exact pass@k, pass@n and pass@top-m of one problem, for every n at once, and confidence intervals over problems."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence, Sized
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that one of k samples passes, from n samples of which c passed.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: ``1 - C(n - c, k) / C(n, k)``, in
    the numerically stable product form of its figure 3, ``1 - prod_{i = n - c + 1}^{n} (1 - k / i)``. A ValueError
    unless k >= 1, n >= k and 0 <= c <= n.
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
    """Bootstrap the percentile interval of the mean over problems, at a level between 0 and 1.

    Problems are drawn with replacement, and the samples of a problem stay together. `values` are [problems] or
    [problems, columns], such as pass@n of each problem for several n; all columns are resampled alike, so that
    intervals of one call can be compared. Returns lower and upper ends, [columns] each (no dimension for one column);
    NaN for a single problem.
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


def pass_at_n(passed: Sequence[bool]) -> NDArray[np.float64]:
    """pass@n for n = 1..N: at least one of n of a task's N samples passes (the oracle; `pass_at_k` with k = n).

    Returns [N] probabilities, means over all subsets of n samples.
    """
    check_pool(passed, passed)
    samples, wrong = len(passed), sum(not right for right in passed)
    all_of, none_of = binomials(samples), binomials(wrong)
    missed = [none_of[n] if n <= wrong else 0 for n in range(1, samples + 1)]
    return np.array([(every - miss) / every for every, miss in zip(all_of[1:], missed)])


def pass_at_top_m(
    passed: Sequence[bool], scores: Sequence[float | None], keys: Sequence[Hashable], m: int
) -> NDArray[np.float64]:
    """pass@top-m for n = 1..N, exactly: the mean over all subsets of n samples of a pool of N.

    Among n samples, those with equal keys are one candidate, ranked by the best score among its samples *in the
    subset*; the m best candidates are run, and the subset counts if one of them passes (Bifurcated attention, section
    5.4: deduplicate, rank by mean log-probability, run three). Where scores tie, failing samples rank before passing
    ones, so that ties never help the ranking and the order of the pool does not matter.

    A subset counts if fewer than m groups of failing duplicates rank before its best passing sample. The sum goes over
    that sample: passing samples before it are left out, samples after it are free, and `HitCounter` counts the
    failing ones before it. All integers, with one correctly rounded division each at the end; cost O(m N^2).

    Args:
        passed: The verdicts of one task's N samples.
        scores: Higher is better, such as the mean log-probability of a token; -inf is a score, None is a missing one.
        keys: Equal for duplicates, such as the text; they must be equal in `passed`, too.
        m: Candidates that are run, at least 1.

    Returns:
        [N] probabilities; entry n - 1 is for n samples.
    """
    check_m(m)
    check_pool(passed, keys)
    known = checked_scores(scores, len(passed))
    failing = group_sizes(passed, keys)[1]
    if m > len(failing):
        return pass_at_n(passed)
    samples = len(passed)
    hits = HitCounter(samples, len(failing), m)
    found = np.zeros(samples, dtype=hits.dtype)  # in u
    counted: Counter[Hashable] = Counter()
    ranked = sorted(range(samples), key=lambda index: (-known[index], passed[index]))
    for rank, index in enumerate(ranked):
        if passed[index]:
            below_m = hits.below_m()
            after = samples - 1 - rank
            found[after : after + len(below_m)] += below_m
        else:
            key = keys[index]
            hits.grow(counted[key], counted[key] + 1)
            counted[key] += 1
    return np.array([count / every for count, every in zip(by_size(found), binomials(samples)[1:])])


def pass_at_first_m(passed: Sequence[bool], keys: Sequence[Hashable], m: int) -> NDArray[np.float64]:
    """pass@m of a ranking without information, for n = 1..N: the first m distinct samples in the order drawn.

    The mean over all orders of drawing n of the pool's N samples. Let A(t) be the number of subsets of t failing
    samples in fewer than m groups, and c the number of passing samples: draw t + 1 is the first to pass, in time, with
    probability ``A(t) / C(N, t) * c / (N - t)``; the result is the sum over t. Arguments and result as of
    `pass_at_top_m`.
    """
    check_m(m)
    failing = group_sizes(passed, keys)[1]
    if m > len(failing):
        return pass_at_n(passed)
    samples, wrong = len(passed), failing.total()
    hits = HitCounter(samples, len(failing), m)
    for size in failing.values():
        hits.grow(0, size)
    prefixes = by_size(hits.below_m())
    every = binomials(samples)
    right = samples - wrong
    first = [count * right / (every[drawn] * (samples - drawn)) for drawn, count in enumerate(prefixes) if right]
    return np.cumsum(np.array([*first, *[0.0] * samples])[:samples])


def powers_of_two(most: int) -> list[int]:
    """List 1, 2, 4 and so on up to a number of samples, and that number."""
    return sorted({1 << power for power in range(most.bit_length())} | {most}) if most else []


@lru_cache(maxsize=64)
def binomials(samples: int) -> tuple[int, ...]:
    """C(samples, n) for n = 0..samples."""
    row = [1]
    for n in range(samples):
        row.append(row[-1] * (samples - n) // (n + 1))
    return tuple(row)


class HitCounter:
    """Counts the subsets of growing groups that hit fewer than m groups; m is at least 1.

    The generating function of the subsets of a group of size s, by size (x) and by whether the group is hit (y), is
    ``1 + y ((1 + x)^s - 1)``. Its product over groups is kept as polynomials in ``u = 1 + x``, one for each power of y
    below m: growing a group then costs shifts and sums. All numbers are exact integers. `samples`, the size of the
    pool, bounds the sum of the groups' sizes, and `groups` their number.
    """

    def __init__(self, samples: int, groups: int, m: int):
        # The absolute coefficients of y^j sum to 2^j C(groups, j) at most; sums over them have `samples` terms.
        bound = 4 * (samples + 1) * sum(comb(groups, hits) << hits for hits in range(m))
        self.dtype: Any = np.int64 if bound < 2**62 else object
        self._degree = 0
        self._by_hits = np.zeros((m, samples + 1), dtype=self.dtype)
        self._by_hits[0, 0] = 1

    def grow(self, size: int, to: int) -> None:
        """Let a group of `size` samples (0 for a new one) have `to` samples."""
        self._degree += to - size
        width = self._degree + 1
        others = self._by_hits[0].copy()  # y^j of the product over the other groups
        for hits in range(1, len(self._by_hits)):
            product = self._by_hits[hits]
            before = product.copy()
            product[to:width] += others[: width - to]
            product[size:width] -= others[: width - size]
            if size:
                before[size:width] -= others[: width - size]
                before[:width] += others[:width]
            others = before

    def below_m(self) -> Any:
        """Coefficients in u of the count of subsets that hit fewer than m groups."""
        return self._by_hits[:, : self._degree + 1].sum(axis=0)


def by_size(in_u: Any) -> list[int]:
    """Shift a polynomial in ``u = 1 + x`` to one in x, whose coefficients count subsets by size (Taylor)."""
    shifted = np.array([int(value) for value in in_u], dtype=object)
    for first in range(len(shifted) - 1):
        shifted[first:] = np.add.accumulate(shifted[first:][::-1])[::-1]
    return [int(value) for value in shifted]


def group_sizes(passed: Sequence[bool], keys: Sequence[Hashable]) -> tuple[Counter[Hashable], Counter[Hashable]]:
    """Count the samples of each group that passes, and of each that fails; samples of one key must agree."""
    check_pool(passed, keys)
    passing = Counter(key for key, right in zip(keys, passed) if right)
    failing = Counter(key for key, right in zip(keys, passed) if not right)
    for key in passing:
        if key in failing:
            raise ValueError(
                f"equal samples must have equal verdicts, got {passing[key]} passed and {failing[key]} failed of key "
                f"{str(key)[:40]!r}; the scorer is flaky: score them again, or take the majority with `settle`"
            )
    return passing, failing


def check_pool(passed: Sized, keys: Sized) -> None:
    if not len(passed):
        raise ValueError("a pool must hold at least one sample, got none; leave the task out")
    if len(keys) != len(passed):
        raise ValueError(f"there must be one key a sample, got {len(keys)} keys for {len(passed)} samples")


def checked_scores(scores: Sequence[float | None], samples: int) -> list[float]:
    if len(scores) != samples:
        raise ValueError(f"there must be one score a sample, got {len(scores)} scores for {samples} samples")
    known = [score for score in scores if score is not None and not math.isnan(score)]
    if len(known) < samples:
        raise ValueError(
            f"every sample needs a log-probability to be ranked by, got none for {samples - len(known)} of {samples} "
            "samples; score the samples with the model again, or rank without log-probabilities"
        )
    return known


def check_m(m: int) -> None:
    if m < 1:
        raise ValueError(f"m must be at least 1, got {m}; it counts the candidates that are run")


def check_ns(ns: Sequence[int], samples: int) -> None:
    if out := [n for n in ns if not 1 <= n <= samples]:
        raise ValueError(
            f"n must be between 1 and the pool's {samples} samples, got {out[0]}; draw more samples or leave it out"
        )
