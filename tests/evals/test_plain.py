"""Plain data as bytes: what comes back, and what hostile bytes can do."""

from __future__ import annotations

import collections
import contextlib
import decimal
import enum
import fractions
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from fractions import Fraction
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_fastdecode.evals.scoring.python.plain import ALL_NAMES, MAX_DEPTH, SAFE_NAMES, dumps, loads
from hf_fastdecode.evals.scoring.python.remote import Link, Remote, canonical

PROPERTY = settings(deadline=None, database=None)
HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=4),
    max_leaves=6,
)
PLAIN = st.recursive(
    HASHABLE
    | st.builds(bytearray, st.binary())
    | st.builds(range, st.integers(), st.integers(), st.integers(1, 9))
    | st.decimals(allow_nan=False)
    | st.fractions()
    | st.sampled_from([int, str, list, ValueError, Ellipsis, NotImplemented]),
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=5)
        | st.tuples(inner)
        | st.builds(collections.deque, st.lists(inner, max_size=3))
        | st.builds(collections.OrderedDict, st.dictionaries(HASHABLE, inner, max_size=3))
    ),
    max_leaves=20,
)


class Objects:
    """A process's side of handles."""

    def __init__(self) -> None:
        self.known: list[Any] = []

    def give(self, value: Any) -> int:
        self.known.append(value)
        return len(self.known) - 1

    def take(self, number: int) -> Any:
        return "handle", number


def sent(value: Any) -> Any:
    """A value as it arrives."""
    objects = Objects()
    return loads(dumps(value, objects.give), objects.take)


def no_handle(*args: Any) -> Any:
    raise AssertionError(f"a handle of {args}")


def described(value: Any) -> Any:
    """A value with its classes: tells 1 from True, -0.0 from 0.0, and one order of a dict from another."""
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(repr(described(one)) for one in value)
    if isinstance(value, dict):
        return type(value), [(described(key), described(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple, collections.deque)):
        return type(value), [described(one) for one in value]
    return type(value), repr(value)


@PROPERTY
@given(PLAIN)
def test_what_comes_back_is_equal_and_of_the_same_class(value: Any) -> None:
    back = loads(dumps(value, no_handle), no_handle)
    assert back == value
    assert described(back) == described(value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, -0.0, 5e-324, complex(math.nan, -math.inf)])
def test_floats_keep_their_bits(value: float) -> None:
    def bits(number: complex) -> bytes:
        return struct.pack("dd", number.real, number.imag)

    assert bits(sent(value)) == bits(value)


def test_integers_of_any_size() -> None:
    for value in (0, -1, 127, 128, -128, -129, 1 << 64, 10**20000, -(10**20000)):
        assert sent(value) == value
        assert type(sent(value)) is int


def test_lone_surrogates_travel() -> None:
    assert sent("\ud800 \U0001f600") == "\ud800 \U0001f600"


def test_a_subclass_travels_as_its_base() -> None:
    class AlwaysEqual:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

        def __iter__(self) -> Any:
            return iter([1, 2, 3])

        def __index__(self) -> int:
            return 42

        __str__ = __float__ = lambda self: "42"  # type: ignore[assignment]

    for base, content in (
        (int, 7),
        (float, 7.5),
        (str, "seven"),
        (list, [7]),
        (tuple, (7,)),
        (dict, {7: 8}),
        (set, {7}),
    ):
        lying = type("Lying", (AlwaysEqual, base), {})(content)
        assert lying == "anything"
        back = sent(lying)
        assert type(back) is base
        assert back == content

    class Color(enum.IntEnum):
        RED = 3

    assert type(sent(Color.RED)) is int
    Point = collections.namedtuple("Point", "x y")
    assert type(sent(Point(1, 2)))._fields == ("x", "y")
    assert type(sent(type("Lying", (AlwaysEqual, Point), {})(1, 2))) is tuple


def test_classes_of_collections() -> None:
    counts, ordered = collections.Counter("abca"), collections.OrderedDict(b=1, a=2)
    assert (type(sent(counts)), sent(counts)) == (collections.Counter, counts)
    assert (type(sent(ordered)), sent(ordered)) == (collections.OrderedDict, ordered)
    assert sent(ordered) != collections.OrderedDict(a=2, b=1)
    lists = collections.defaultdict(list, {1: [2]})
    assert (sent(lists), sent(lists).default_factory) == (lists, list)
    assert sent(collections.defaultdict(lambda: 3, {1: 2})).default_factory is None
    assert sent(decimal.Decimal("1.50")) == decimal.Decimal("1.5")
    assert sent(fractions.Fraction(1, 3)) == fractions.Fraction(1, 3)


def test_views_and_ranges_compare_as_such() -> None:
    table = {1: "a", 2: "b"}
    assert sent(table.keys()) == table.keys()
    assert sent(table.items()) == table.items()
    assert list(sent(table.values())) == ["a", "b"]
    assert sent(table.values()) != ["a", "b"]
    assert sent(range(2, 9, 3)) == range(2, 9, 3)
    assert sent(range(3)) != [0, 1, 2]


def test_all_else_is_a_handle() -> None:
    thing = object()
    for value in (thing, print, iter([1]), len, map(str, [1]), enum, (one for one in "ab"), memoryview(b"a"), eval):
        assert sent(value) == ("handle", 0)
    objects = Objects()
    assert loads(dumps([1, {"key": thing}], objects.give), objects.take) == [1, {"key": ("handle", 0)}]
    assert objects.known == [thing]
    assert loads(dumps([len, eval], no_handle, ALL_NAMES), no_handle, ALL_NAMES) == [len, eval]


def test_sets_keep_the_order_of_displays() -> None:
    for display in ({12, 13, 14, 15, 16}, {16, 32, 48, 1}, set(range(30, 40)), {3, 2, 1}):
        assert list(sent(display)) == list(display)


def test_containers_that_hold_themselves_are_refused() -> None:
    endless: list[Any] = []
    endless.append({"inside": endless})
    with pytest.raises(ValueError, match="one that holds itself"):
        sent(endless)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_depth_is_bounded_on_both_sides() -> None:
    assert sent(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} deep"):
        sent(nested(MAX_DEPTH + 1))
    one_list = b"l\1\0\0\0"
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} deep"):
        loads(one_list * 100_000, no_handle)


@PROPERTY
@given(st.binary(max_size=200))
def test_any_bytes_give_plain_data_or_an_error(data: bytes) -> None:
    try:
        value = loads(data, lambda number: None)
    except ValueError:
        return
    assert sent(value) == value or value != value


@PROPERTY
@given(PLAIN, st.data())
def test_damaged_bytes_give_plain_data_or_an_error(value: Any, data: st.DataObject) -> None:
    encoded = bytearray(dumps(value, no_handle))
    place = data.draw(st.integers(0, len(encoded) - 1))
    encoded[place] = data.draw(st.integers(0, 255))
    with contextlib.suppress(ValueError):
        loads(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]), lambda number: None)


ZERO = bytes(4)
DEFAULTS = b"s\13\0\0\0defaultdict"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "bytes are missing"),
        (b"?\0\0\0\0", "not a value"),
        (2 * (b"N" + ZERO), "5 bytes after the value"),
        (b"i\xff\xff\xff\xff", "bytes are missing"),
        (b"l\xff\xff\xff\xffN", "not a value|missing"),
        (b"S\1\0\0\0l" + ZERO, "unhashable"),
        (b"d\1\0\0\0N" + ZERO, "a key without a value"),
        (b"r\3\0\0\0" + 2 * b"i\1\0\0\0\1" + b"i\1\0\0\0\0", "must not be zero"),
        (b"f\1\0\0\0\0", "not a value"),
        (b"n\4\0\0\0eval", "'eval' may not occur"),
        (b"n\4\0\0\0type", "'type' may not occur"),
        (b"n\12\0\0\0__import__", "'__import__' may not occur"),
        (b"n\12\0\0\0SystemExit", "'SystemExit' may not occur"),
        (b"V" + ZERO, "not enough values"),
        (b"V\2\0\0\0" + DEFAULTS + b"s\1\0\0\0x", "first argument must be callable or None"),
        (b"V\2\0\0\0" + DEFAULTS + b"H" + ZERO, "a defaultdict is made from plain data"),
        (b"V\2\0\0\0s\7\0\0\0CounterH" + ZERO, "a Counter is made from plain data"),
        (b"V\2\0\0\0s\7\0\0\0Decimals\1\0\0\0x", "not a value"),
        (b"V\3\0\0\0s\10\0\0\0Fraction" + b"i\1\0\0\0\1" + b"i\1\0\0\0\0", "not a value"),
        (b"V\1\0\0\0s\5\0\0\0Popen", "not a value: 'Popen'"),
        (b"s\1\0\0\0\xff", "codec can't decode"),
    ],
)
def test_hostile_bytes(data: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        loads(data, lambda number: object())


def test_names_that_may_come_from_programs_do_no_harm() -> None:
    assert {"int", "dict", "ValueError", "Ellipsis"} <= SAFE_NAMES
    assert not SAFE_NAMES & {"eval", "exec", "open", "type", "getattr", "setattr", "compile", "exit", "input", "super"}
    assert "__import__" not in ALL_NAMES


ONES: list[Any] = [1, 1.0, True]
EQUAL: list[list[Any]] = [
    ONES,
    [{one} for one in ONES] + [frozenset(ONES), {1: 0}.keys()],
    [{one: 2} for one in ONES] + [OrderedDict({1: 2.0}), defaultdict(int, {1: 2}), Counter({True: 2})],
    [[one] for one in ONES],
    [(one,) for one in ONES],
    [{1: {2: 3}, "a": 4}, {"a": 4.0, 1.0: OrderedDict({2: 3})}],
    [{1, 2}, {2.0, 1}, {2: 0, 1: 0}.keys()],
    [{1: 2}.items(), {(1.0, 2)}, frozenset([(True, 2)])],
    [0, 0.0, -0.0, False],
    [b"a", bytearray(b"a")],
    [deque([1]), deque([1.0])],
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
