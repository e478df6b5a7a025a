"""pass@k against its definition."""

from __future__ import annotations

from fractions import Fraction
from math import comb

import pytest

from hf_fastdecode.evals.metrics.estimates import pass_at_k


@pytest.mark.parametrize(("n", "k"), [(1, 1), (5, 1), (5, 5), (32, 8), (63, 32), (1000, 100)])
def test_equals_the_combinatorial_definition(n: int, k: int) -> None:
    for c in {0, 1, n // 3, n - k, n - 1, n} - {-1}:
        exact = 1 - Fraction(comb(n - c, k), comb(n, k))
        assert pass_at_k(n, c, k) == pytest.approx(float(exact), rel=1e-12, abs=1e-12)


def test_pass_at_1_is_the_share_that_passed() -> None:
    assert pass_at_k(32, 12, 1) == pytest.approx(12 / 32)


@pytest.mark.parametrize(
    ("n", "c", "k", "message"),
    [
        (4, 1, 0, "k must be at least 1, got 0"),
        (4, 1, 5, "got n = 4 < k = 5; draw more samples or lower k"),
        (4, 5, 1, "between 0 and n = 4, got 5"),
        (4, -1, 1, "between 0 and n = 4, got -1"),
    ],
)
def test_errors_name_value_bound_and_remedy(n: int, c: int, k: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pass_at_k(n, c, k)
