"""pass@top-m: some of the m best-ranked distinct samples passes, exactly and for every n at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from numpy.typing import NDArray

from .checks import check_m, check_pool, checked_scores
from .subsets import HitCounter, binomials, by_size, group_sizes


def pass_at_n(passed: Sequence[bool]) -> NDArray[np.float64]:
    """pass@n for n = 1..N: some of n samples passes (the oracle; `pass_at_k` with k = n).

    Args:
        passed: Of the N samples of one task.

    Returns:
        [N] chances; entry n - 1 is the mean over all subsets of n samples.

    Raises:
        ValueError: There are no samples.
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

    Of n samples, those with equal keys are one candidate, ranked by the best score that one of them has *among the n*;
    the m best candidates are run, and the draw counts if one of them passes (Bifurcated attention, section 5.4:
    deduplicate, rank by mean log-probability, run three). Where scores tie, samples that fail stand before samples
    that pass, so that a tie never flatters the ranking and the order of the pool does not matter.

    A subset counts if fewer than m groups of failing duplicates stand before its best-ranked passing sample. The sum
    goes over that sample: passing samples before it are left out, samples behind it are free, and the failing ones
    before it are counted by `HitCounter`. Integers throughout, one correctly rounded division each at the end; cost
    O(m N^2).

    Args:
        passed: Of the N samples of one task.
        scores: The higher the better, such as the mean log-probability of a token; -inf is a score, None is none.
        keys: Equal for duplicates, such as the text.
        m: Candidates that are run, at least 1.

    Returns:
        [N] chances; entry n - 1 is for n samples.

    Raises:
        ValueError: m is below 1, the pool is empty or its columns differ in length, a score is missing, or equal keys
            differ in `passed`.
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
    seen: Counter[Hashable] = Counter()
    ranked = sorted(range(samples), key=lambda index: (-known[index], passed[index]))
    for place, index in enumerate(ranked):
        if passed[index]:
            below_m = hits.below_m()
            behind = samples - 1 - place
            found[behind : behind + len(below_m)] += below_m
        else:
            key = keys[index]
            hits.grow(seen[key], seen[key] + 1)
            seen[key] += 1
    return np.array([count / every for count, every in zip(by_size(found), binomials(samples)[1:])])


def pass_at_first_m(passed: Sequence[bool], keys: Sequence[Hashable], m: int) -> NDArray[np.float64]:
    """What a ranking without information gives, for n = 1..N: the first m distinct samples in the order drawn.

    The mean over all orders of drawing n of the pool's N samples. With A(t) of the subsets of t failing samples in
    fewer than m groups, and c samples that pass, draw t + 1 is the first to pass, in time, with chance
    ``A(t) / C(N, t) * c / (N - t)``; these add up to the result.

    Args:
        passed: Of the N samples of one task.
        keys: Equal for duplicates.
        m: Candidates that are run, at least 1.

    Returns:
        [N] chances; entry n - 1 is for n samples.

    Raises:
        ValueError: m is below 1, the pool is empty or its columns differ in length, or equal keys differ in `passed`.
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
    """1, 2, 4 and so on up to a number of samples, and that number."""
    return sorted({1 << power for power in range(most.bit_length())} | {most}) if most else []
