"""Intervals over problems."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import bootstrap, norm

from hf_fastdecode.evals.metrics.estimates import bootstrap_interval


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
    [
        ({"values": []}, "at least one problem, got none"),
        ({"values": 0.5}, "at least one problem, got none"),
        ({"level": 1.0}, "level must be between 0 and 1, got 1.0"),
        ({"resamples": 0}, "resamples must be at least 1, got 0"),
    ],
)
def test_errors_name_value_bound_and_remedy(change, message):
    given = {"values": [0.5]} | change
    with pytest.raises(ValueError, match=message):
        bootstrap_interval(**given)
