"""Majority vote against enumeration."""

from __future__ import annotations

import numpy as np
import pytest

from hf_fastdecode.evals.metrics import pass_at_votes
from hf_fastdecode.evals.metrics.estimates import pass_at_n

from .pools import votes_by_hand

OUTPUTS = [1, 1, 2, 2, 3, 4, None, None]
PASSED = [True, True, False, False, True, False, False, False]


@pytest.mark.parametrize("m", [1, 2, 3, 9])
@pytest.mark.parametrize("seed", [0, 1])
def test_estimates_agree_with_enumeration(m, seed):
    ns = range(1, len(OUTPUTS) + 1)
    found, errors = pass_at_votes(PASSED, OUTPUTS, ns, m=m, draws=4000, seed=seed)
    exact = votes_by_hand(PASSED, OUTPUTS, m)
    assert (np.abs(found - exact) <= 4.5 * errors + 1e-12).all()
    assert errors.max() < 0.5 / 4000**0.5 + 1e-4


def test_ties_share_the_chance():
    found, errors = pass_at_votes([True, False, False], ["a", "b", "c"], [3], m=1)
    assert found[0] == pytest.approx(1 / 3)
    assert errors[0] == pytest.approx(0)
    assert pass_at_votes([True, False, False], ["a", "b", "c"], [3], m=2)[0][0] == pytest.approx(2 / 3)


def test_a_crash_has_no_vote():
    assert pass_at_votes([False] * 3 + [True], [None, None, None, "a"], [4], m=1)[0][0] == 1
    assert pass_at_votes([False] * 3, [None] * 3, [1, 3])[0].tolist() == [0, 0]


def test_the_majority_wins_at_last():
    passed, outputs = [True] * 5 + [False] * 7, ["a"] * 5 + ["b"] * 3 + ["c"] * 4
    found, _ = pass_at_votes(passed, outputs, [1, 12], draws=20_000)
    assert found[0] == pytest.approx(5 / 12, abs=0.02)
    assert found[1] == 1


def test_enough_candidates_are_the_oracle():
    found, errors = pass_at_votes(PASSED, range(8), range(1, 9), m=8, draws=20_000)
    assert (np.abs(found - pass_at_n(PASSED)) <= 4.5 * errors + 1e-12).all()


def test_a_seed_fixes_the_draws():
    first, again, other = (pass_at_votes(PASSED, OUTPUTS, [3], draws=50, seed=seed)[0][0] for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ns": [0]}, "between 1 and the pool's 8 samples, got 0"),
        ({"ns": [9]}, "between 1 and the pool's 8 samples, got 9"),
        ({"draws": 1}, "draws must be at least 2"),
        ({"m": 0}, "m must be at least 1"),
        ({"outputs": [1] * 8}, "equal verdicts, got 3 passed and 5 failed"),
        ({"passed": [], "outputs": []}, "at least one sample"),
    ],
)
def test_errors_name_value_bound_and_remedy(change, message):
    given = {"passed": PASSED, "outputs": OUTPUTS, "ns": [1]} | change
    with pytest.raises(ValueError, match=message):
        pass_at_votes(**given)


def test_more_candidates_than_answers_are_no_more_work():
    found, _ = pass_at_votes(PASSED, OUTPUTS, [3], m=10**9, draws=50)
    assert 0 < found[0] <= 1
