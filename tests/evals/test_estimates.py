"""pass@k, pass@top-m and intervals against enumeration."""

from __future__ import annotations

import random
from fractions import Fraction
from math import comb

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import bootstrap, norm

from hf_fastdecode.evals.metrics import (
    HitCounter,
    bootstrap_interval,
    pass_at_first_m,
    pass_at_k,
    pass_at_n,
    pass_at_top_m,
    powers_of_two,
)

from ..function_calls import calls_of
from .run_folders import first_m_by_hand, pools, top_m_by_hand


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (5, 5), (32, 8), (63, 32), (1000, 100)])
def test_equals_the_combinatorial_definition(n: int, k: int) -> None:
    for c in {0, 1, n // 3, n - k, n - 1, n} - {-1}:
        exact = 1 - Fraction(comb(n - c, k), comb(n, k))
        assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        (4, 1, 0, "k must be at least 1, got 0"),
        (4, 1, 5, "got n = 4 < k = 5; draw more samples or lower k"),
        (4, 5, 1, "between 0 and n = 4, got 5"),
        (4, -1, 1, "between 0 and n = 4, got -1"),
    ],
)
def test_errors_of_pass_at_k(n: int, c: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)


NUMBERS = st.integers(1, 4)


@given(pools(), NUMBERS)
@settings(max_examples=150, deadline=None)
def test_top_m_is_the_mean_over_all_subsets(columns, m):
    assert pass_at_top_m(*columns, m) == pytest.approx(top_m_by_hand(columns, m), rel=1e-14, abs=0)


@given(pools(most=5), NUMBERS)
@settings(max_examples=60, deadline=None)
def test_first_m_is_the_mean_over_all_orders(columns, m):
    passed, _, keys = columns
    assert pass_at_first_m(passed, keys, m) == pytest.approx(first_m_by_hand(columns, m), rel=1e-13, abs=0)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_pass_at_n_is_pass_at_k(passed):
    every = [pass_at_k(len(passed), sum(passed), n) for n in range(1, len(passed) + 1)]
    assert pass_at_n(passed) == pytest.approx(every, rel=1e-13, abs=0)


@given(pools(most=40), NUMBERS, st.randoms(use_true_random=False))
@settings(deadline=None)
def test_what_holds_between_them(columns, m, order):
    passed, scores, keys = columns
    every, top, first = pass_at_n(passed), pass_at_top_m(*columns, m), pass_at_first_m(passed, keys, m)
    share = sum(passed) / len(passed)
    assert every[0] == top[0] == share
    assert first[0] == pytest.approx(share, rel=1e-15)
    assert (np.diff(every) >= 0).all()
    assert (np.diff(first) >= 0).all()
    assert (top <= every).all()
    assert (pass_at_top_m(*columns, m + 1) >= top).all()
    assert (pass_at_first_m(passed, keys, m + 1) >= first - 1e-15).all()
    assert (top[:m] == every[:m]).all()  # of m samples at most, all are run
    positions = list(range(len(keys)))
    order.shuffle(positions)
    shuffled = ([column[position] for position in positions] for column in (passed, scores, keys))
    assert (pass_at_top_m(*shuffled, m) == top).all()


def test_a_closed_form_without_duplicates():
    # One right sample, with `better` wrong ones before it: among n samples it is run if it is drawn, and fewer than m
    # of those before it are.
    samples, better, m = 20, 9, 3
    passed = [index == better for index in range(samples)]
    found = pass_at_top_m(passed, [-float(index) for index in range(samples)], range(samples), m)
    for n in range(1, samples + 1):
        ways = sum(comb(better, hits) * comb(samples - 1 - better, n - 1 - hits) for hits in range(min(m, n)))
        assert found[n - 1] == float(Fraction(ways, comb(samples, n)))


@pytest.mark.parametrize("right", [False, True])
def test_all_alike(right):
    for samples in (1, 2, 63):
        for keys in (range(samples), [0] * samples):
            columns = ([right] * samples, [-1.0] * samples, keys)
            for found in (pass_at_top_m(*columns, 3), pass_at_first_m(columns[0], keys, 3), pass_at_n(columns[0])):
                assert list(found) == [float(right)] * samples


def random_pool(samples: int, groups: int, seed: int):
    generator = random.Random(seed)
    right = [generator.random() < 0.3 for _ in range(groups)]
    keys = [generator.randrange(groups) for _ in range(samples)]
    return [right[key] for key in keys], [-generator.random() for _ in keys], keys


def test_wide_and_narrow_integers_agree(monkeypatch):
    columns = random_pool(300, 200, seed=1)
    fast = pass_at_top_m(*columns, 3), pass_at_first_m(columns[0], columns[2], 3)
    narrow = HitCounter.__init__

    def wide(self, samples, groups, m):
        narrow(self, samples, groups, m)
        assert self.dtype is np.int64
        self.dtype, self._by_hits = object, self._by_hits.astype(object)

    monkeypatch.setattr(HitCounter, "__init__", wide)
    assert (pass_at_top_m(*columns, 3) == fast[0]).all()
    assert (pass_at_first_m(columns[0], columns[2], 3) == fast[1]).all()


def test_many_candidates_take_wide_integers():
    passed, scores, keys = random_pool(120, 100, seed=2)
    assert HitCounter(120, 70, 20).dtype is object
    top, every = pass_at_top_m(passed, scores, keys, 20), pass_at_n(passed)
    assert (top <= every).all()
    assert (top[:20] == every[:20]).all()
    assert top[-1] == top_m_of_all(passed, scores, keys, 20)


def top_m_of_all(passed, scores, keys, m):
    ranked = sorted(range(len(keys)), key=lambda index: -scores[index])
    run = list(dict.fromkeys(keys[index] for index in ranked))[:m]
    return float(any(right for right, key in zip(passed, keys) if key in run))


def test_a_thousand_samples_take_some_calls_each():
    columns = random_pool(1024, 700, seed=3)
    assert calls_of(lambda: pass_at_top_m(*columns, 3)) < 20 * 1024


@pytest.mark.parametrize(("most", "ns"), [(0, []), (1, [1]), (2, [1, 2]), (7, [1, 2, 4, 7]), (8, [1, 2, 4, 8])])
def test_powers_of_two(most, ns):
    assert powers_of_two(most) == ns


@pytest.mark.parametrize(
    ("columns", "m", "message"),
    [
        (([], [], []), 3, "at least one sample, got none"),
        (([True], [-1.0], ["a"]), 0, "m must be at least 1, got 0"),
        (([True], [-1.0, -2.0], ["a"]), 1, "got 2 scores for 1 samples"),
        (([True], [-1.0], ["a", "b"]), 1, "got 2 keys for 1 samples"),
        (([True, False], [-1.0, None], ["a", "b"]), 1, "needs a log-probability.*got none for 1 of 2 samples"),
        (([True, False], [float("nan")] * 2, ["a", "b"]), 1, "got none for 2 of 2 samples.*rank without"),
        (
            ([True, False, False], [-1.0] * 3, ["same"] * 3),
            1,
            "got 1 passed and 2 failed of key 'same'; the scorer is flaky.*`settle`",
        ),
    ],
)
def test_errors_of_top_m(columns, m, message):
    with pytest.raises(ValueError, match=message):
        pass_at_top_m(*columns, m)


def test_agrees_with_scipy():
    values = np.random.default_rng(1).random(60) ** 2
    low, high = bootstrap_interval(values, resamples=20_000)
    theirs = bootstrap((values,), np.mean, n_resamples=20_000, method="percentile", rng=0).confidence_interval
    spread = values.std() / 60**0.5
    assert low == pytest.approx(theirs.low, abs=0.05 * spread)
    assert high == pytest.approx(theirs.high, abs=0.05 * spread)


def test_covers_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(2)
    tables = (generator.random((100, 40)) < 0.4).astype(float).T  # columns are resampled alike, rows are problems
    low, high = bootstrap_interval(tables, level=0.9, resamples=2000)
    inside = ((low <= 0.4) & (high >= 0.4)).mean()
    assert low.shape == high.shape == (100,)
    assert 0.8 <= inside <= 0.98


def test_width_is_that_of_the_normal_distribution():
    values = np.random.default_rng(3).random(500)
    low, high = bootstrap_interval(values, level=0.8)
    assert (high - low) / 2 == pytest.approx(norm.ppf(0.9) * values.std() / 500**0.5, rel=0.05)


def test_equal_problems_leave_no_doubt():
    low, high = bootstrap_interval([[0.25, 1.0]] * 5)
    assert list(low) == list(high) == [0.25, 1.0]


def test_one_problem_says_nothing_of_problems():
    assert np.isnan(bootstrap_interval([[0.25, 1.0]])).all()
    assert np.isnan(bootstrap_interval([0.25])).all()


def test_a_seed_fixes_the_draws():
    values = np.random.default_rng(4).random(9)
    first, again, other = (bootstrap_interval(values, resamples=50, seed=seed)[0] for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("change", "message"),
    [({"values": []}, "at least one problem, got none"), ({"values": 0.5}, "at least one problem, got none")],
)
def test_errors_of_intervals(change, message):
    given = {"values": [0.5]} | change
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(**given)
