"""Exact counts of the subsets of a pool, by how many groups of duplicates they hit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from functools import lru_cache
from math import comb
from typing import Any

import numpy as np

from .checks import check_pool


@lru_cache(maxsize=64)
def binomials(samples: int) -> tuple[int, ...]:
    """C(samples, n) for n = 0..samples."""
    row = [1]
    for n in range(samples):
        row.append(row[-1] * (samples - n) // (n + 1))
    return tuple(row)


class HitCounter:
    """Counts the subsets of growing groups that hit fewer than m groups.

    The generating function of the subsets of a group of size s, by size (x) and by whether the group is hit (y), is
    ``1 + y ((1 + x)^s - 1)``. Its product over groups is kept as polynomials in ``u = 1 + x``, one for each power of y
    below m: there a group that grows costs shifts and sums. All numbers are exact integers.

    Args:
        samples: Of the pool: bounds the groups' sizes taken together, and how many counts are summed.
        groups: An upper bound of the number of groups.
        m: Hits are told apart below this number, at least 1.
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
        rest = self._by_hits[0].copy()  # y^j of the product over the other groups
        for hits in range(1, len(self._by_hits)):
            own = self._by_hits[hits]
            before = own.copy()
            own[to:width] += rest[: width - to]
            own[size:width] -= rest[: width - size]
            if size:
                before[size:width] -= rest[: width - size]
                before[:width] += rest[:width]
            rest = before

    def below_m(self) -> Any:
        """Coefficients in u of the count of subsets that hit fewer than m groups."""
        return self._by_hits[:, : self._degree + 1].sum(axis=0)


def by_size(in_u: Any) -> list[int]:
    """The coefficients in x of a polynomial in ``u = 1 + x``: counts of subsets by size (a Taylor shift)."""
    shifted = np.array([int(value) for value in in_u], dtype=object)
    for first in range(len(shifted) - 1):
        shifted[first:] = np.add.accumulate(shifted[first:][::-1])[::-1]
    return [int(value) for value in shifted]


def group_sizes(passed: Sequence[bool], keys: Sequence[Hashable]) -> tuple[Counter[Hashable], Counter[Hashable]]:
    """Sizes of the groups that pass, and of those that fail.

    Raises:
        ValueError: Samples of one key differ in `passed`.
    """
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
