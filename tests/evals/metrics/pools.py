"""Small random pools, and the metrics by enumeration of every subset."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import combinations, permutations
from math import comb

from hypothesis import strategies as st

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


def votes_by_hand(passed: Sequence[bool], outputs: Sequence[int | None], m: int) -> list[float]:
    """The m most frequent outputs, over every order of the outputs that tie."""

    def value(chosen: Sequence[int]) -> Fraction:
        votes = Counter(outputs[index] for index in chosen if outputs[index] is not None)
        right = {outputs[index] for index in chosen if passed[index]}
        orders = [
            sorted(order, key=lambda output: -votes[output])[:m]  # stable: ties stay in the order given
            for order in permutations(votes)
        ]
        return Fraction(sum(bool(right & set(order)) for order in orders), len(orders)) if votes else Fraction()

    return mean_over_subsets(len(passed), value)
