"""Texts of values: equal for equal ones, whatever their classes, and no others."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from decimal import Decimal
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_fastdecode.evals.scoring.python.remote import Link, Remote, canonical

ONES: list[Any] = [1, 1.0, True, Fraction(1), Decimal("1.0"), Decimal("10E-1"), 1 + 0j]
EQUAL: list[list[Any]] = [
    ONES,
    [{one} for one in ONES] + [frozenset(ONES), {1: 0}.keys()],
    [{one: 2} for one in ONES] + [OrderedDict({1: 2.0}), defaultdict(int, {1: 2}), Counter({True: 2})],
    [[one] for one in ONES],
    [(one,) for one in ONES],
    [{1: {2: 3}, "a": 4}, {"a": Decimal(4), 1.0: OrderedDict({2: Fraction(3)})}],
    [{1, 2}, {2.0, 1}, {2: 0, 1: 0}.keys()],
    [{1: 2}.items(), {(1.0, 2)}, frozenset([(True, Decimal(2))])],
    [0, 0.0, -0.0, False, Decimal("-0"), 0j, complex(-0.0, -0.0), Fraction(0)],
    [0.5, Fraction(1, 2), Decimal("0.50"), 0.5 + 0j],
    [10**400, Fraction(10**400), Decimal("1e400")],
    [b"a", bytearray(b"a")],
    [range(0, 3, 2), range(0, 4, 2)],
    [range(0), range(5, 2)],
    [range(7, 8), range(7, 9, 5)],
    [deque([1]), deque([1.0])],
    [Counter({"a": 1, "b": 0}), Counter({"c": 0.0, "a": True}), Counter("a")],
    [Fraction(1, 3), Fraction(2, 6)],
]
ALONE: list[Any] = [
    *(None, "1", "None", "", "a", b"", -1, -2, 1j, 0.1, Fraction(1, 10), 2**53, 2**53 + 1),
    *(2**61 - 1, float("inf"), float("-inf"), float("nan"), -(10**400), 10**400 + 1),
    *([], (), set(), {}, deque(), {}.values(), {0: 1}.values(), [1, 2], [2, 1], [[1], 2], [[1, 2]], ["1,2"], [None]),
    *(range(3), range(10**30), range(0, 10**30, 7), [0, 1, 2], {1: 1, 2: 2}, {1: 2, 2: 1}, {"a:b": "c"}, {"a": "b:c"}),
    *(int, len, Ellipsis, NotImplemented, ValueError),
]


@pytest.mark.parametrize("values", EQUAL, ids=lambda values: repr(values[0])[:20])
def test_equal_values_share_a_text(values: list[Any]) -> None:
    assert all(one == values[0] for one in values), "the expectation itself"
    assert len({canonical(one) for one in values}) == 1


def test_other_values_have_other_texts() -> None:
    for one, other in combinations([*ALONE, *(values[0] for values in EQUAL)], 2):
        assert canonical(one) != canonical(other), (one, other)


NUMBERS = st.integers() | st.floats() | st.fractions() | st.decimals() | st.booleans() | st.complex_numbers()


@given(NUMBERS, NUMBERS)
def test_numbers(one: Any, other: Any) -> None:
    if not any(isinstance(number, Decimal) and number.is_snan() for number in (one, other)) and one == other:
        assert canonical(one) == canonical(other)


@given(st.fractions(), st.integers(0, 400))
def test_numbers_in_other_classes(number: Fraction, scale: int) -> None:
    whole = number.numerator * 10**scale
    assert canonical(whole) == canonical(Fraction(whole)) == canonical(Decimal(whole))
    assert canonical(whole) != canonical(whole + 1)
    assert canonical(float(number)) == canonical(Fraction(float(number))) == canonical(Decimal(float(number)))


@pytest.mark.parametrize("text", ["1E+999999999999999999", "-1E-999999999999999999", "sNaN", "-NaN12", "-Infinity"])
def test_decimals_of_any_exponent(text: str) -> None:
    assert canonical(Decimal(text)) == canonical([Decimal(text)])[5:-1]


def test_an_object_of_the_program_is_asked_for_nothing() -> None:
    def exchange(request: bytes) -> bytes:
        raise AssertionError("a request was sent")

    link = Link(exchange)
    one, other = Remote(link, 0), Remote(link, 1)
    assert canonical(one) == canonical(other) == "object"
    assert canonical([one]) == canonical([other]) != canonical(["object"])
    for value in (deque([one]), {1: one}.values(), {1: one}.items(), {one: one}.keys(), Counter({one: one}), {one}):
        canonical(value)


def test_addresses_in_texts_are_left_out() -> None:
    assert canonical("[<A at 0x7f01>, <B at 0x0ab>]") == canonical("[<A at 0x2>, <B at 0x3>]")
    assert canonical("<A at 0x7f01>") != canonical("<B at 0x7f01>")
