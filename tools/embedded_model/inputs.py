"""Inputs of the generated functions: pipeline sources and the random arguments of their asserts."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

from .grammar import DICT, INT, INTS, TEXT, WORDS, Source

_WORDS: Final = tuple(
    "apple banana cherry table river stone cloud tiger lemon pencil radar level noon civic window garden silver orange "
    "rabbit candle monkey planet rocket basket butter kitten letter summer winter spring music paper house horse train "
    "green brown black white eel owl ant bee cat dog sun moon star tree rain snow wind fire sea lake hill road ship "
    "bread salt sugar water milk tea egg rice corn bean nut oil pie jam kayak refer madam stats tenet area idea unit "
    "open onion ocean actor eagle island ear eye arm leg hand foot nose lip toe heart brain bone skin blue red gold".split()
)


def _ints(rng: random.Random, low: int = -9, high: int = 20) -> list[int]:
    values = [rng.randint(low, high) for _ in range(rng.randint(3, 6))]
    if rng.random() < 0.3:
        values[rng.randrange(len(values))] = rng.choice(values)  # a duplicate now and then
    return values


def _words(rng: random.Random) -> list[str]:
    return [rng.choice(_WORDS) for _ in range(rng.randint(3, 4))]


def _text(rng: random.Random) -> str:
    return " ".join(rng.choice(_WORDS) for _ in range(rng.choice((1, 1, 2, 3))))


def _dict(rng: random.Random) -> dict[str, int]:
    return {
        key: rng.randint(-5, 20) for key in rng.sample(_WORDS if rng.random() < 0.5 else "abcdefgh", rng.randint(2, 4))
    }


DRAWS: Final[dict[str, Callable[[random.Random], Any]]] = {
    "ints": _ints,
    "naturals": lambda rng: _ints(rng, 1, 15),
    "tuple": lambda rng: tuple(_ints(rng)),
    "rows": lambda rng: [[rng.randint(-5, 12) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(2, 3))],
    "pairs": lambda rng: [(rng.choice(_WORDS), rng.randint(-5, 15)) for _ in range(rng.randint(2, 4))],
    "small": lambda rng: rng.randint(3, 14),
    "low": lambda rng: rng.randint(-4, 6),
    "high": lambda rng: rng.randint(7, 14),
    "count": lambda rng: rng.randint(6, 60),
    "large": lambda rng: rng.randint(100, 99999),
    "words": _words,
    "text": _text,
    "sentence": lambda rng: " ".join(_words(rng)),
    "csv": lambda rng: ",".join(str(value) for value in _ints(rng)),
    "dict": _dict,
    "param": lambda rng: rng.randint(1, 6),
}

_NUMS = "nums/numbers/lst/values"
_N = "n/num/number"

SOURCES: Final = (
    Source(
        (("{a}", "ints"),), "{0}", "{0}", INTS,
        ("the numbers in the given list", "the elements of a list", "the integers in a list"),
        "a list of numbers", "list", weight=9,
    ),
    Source((("{a}", "tuple"),), "{0}", "list({0})", INTS, ("the numbers in the given tuple",), "a tuple of numbers", "tuple", weight=2),
    Source((("n", "small"),), "range(1, {0} + 1)", "list(range(1, {0} + 1))", INTS, ("the numbers from 1 to n",), "the numbers from 1 to n", "upto", weight=3),
    Source(
        (("a/low/start", "low"), ("b/high/end", "high")), "range({0}, {1} + 1)", "list(range({0}, {1} + 1))", INTS,
        ("the numbers from the first to the second argument",), "the numbers from the first to the second argument", "between", weight=2,
    ),
    Source(
        (("n", "count"),), "[d for d in range(1, {0} + 1) if {0} % d == 0]", "", INTS,
        ("the divisors of the given number",), "the divisors of a number", "divisors", weight=2,
    ),
    Source(
        ((_N, "large"),), "[int(d) for d in str({0})]", "", INTS,
        ("the digits of the given number",), "the digits of a number", "digits", weight=2,
    ),
    Source(
        (("d/data/scores", "dict"),), "{0}.values()", "list({0}.values())", INTS,
        ("the values of the given dictionary",), "the values of a dictionary", "values", weight=2,
    ),
    Source(
        (("s/text", "sentence"),), "[len(w) for w in {0}.split()]", "", INTS,
        ("the word lengths of the given sentence",), "the word lengths of a sentence", "word_lengths", weight=1.5,
    ),
    Source(
        (("rows/lists/matrix", "rows"),), "[x for row in {0} for x in row]", "", INTS,
        ("the numbers in the given nested list",), "the numbers in a nested list", "nested", weight=2,
    ),
    Source(
        (("rows/lists/matrix", "rows"),), "[sum(row) for row in {0}]", "", INTS,
        ("the row sums of the given matrix",), "the row sums of a matrix", "row_sums", weight=1.5,
    ),
    Source(
        (("rows/lists/matrix", "rows"),), "[max(row) for row in {0}]", "", INTS,
        ("the row maxima of the given matrix",), "the row maxima of a matrix", "row_maxima",
    ),
    Source(
        (("xs/first/a", "ints"), ("ys/second/b", "ints")), "[p + q for p, q in zip({0}, {1})]", "", INTS,
        ("the pairwise sums of two lists",), "the pairwise sums of two lists", "pair_sums", weight=1.5,
    ),
    Source(
        (("xs/first/a", "ints"), ("ys/second/b", "ints")), "[p * q for p, q in zip({0}, {1})]", "", INTS,
        ("the pairwise products of two lists",), "the pairwise products of two lists", "pair_products", weight=1.5,
    ),
    Source(
        (("xs/first/a", "naturals"), ("ys/second/b", "naturals")), "[e for e in {0} if e in {1}]", "", INTS,
        ("the elements of the first list that occur in the second",), "the elements of one list that occur in another", "common",
    ),
    Source(
        (("xs/first/a", "naturals"), ("ys/second/b", "naturals")), "[e for e in {0} if e not in {1}]", "", INTS,
        ("the elements of the first list that are missing from the second",), "the elements of one list missing from another", "missing",
    ),
    Source(
        (("xs/first/a", "ints"), ("ys/second/b", "ints")), "{0} + {1}", "", INTS,
        ("the numbers in both lists together",), "two lists put together", "concat",
    ),
    Source(
        (("pairs/items", "pairs"),), "[p[1] for p in {0}]", "", INTS,
        ("the numbers in a list of pairs",), "the numbers in a list of pairs", "pair_values", weight=1.5,
    ),
    Source(
        (("s/text", "csv"),), "[int(p) for p in {0}.split(',')]", "", INTS,
        ("the numbers in a comma separated string",), "the numbers in a comma separated string", "parsed", weight=1.5,
    ),
    Source((("words/strings/names", "words"),), "{0}", "{0}", WORDS, ("the words in the given list", "the strings in a list"), "a list of words", "words", weight=6),
    Source((("s/text/sentence", "sentence"),), "{0}.split()", "", WORDS, ("the words of the given sentence",), "the words of a sentence", "sentence", weight=4),
    Source((("pairs/items", "pairs"),), "[p[0] for p in {0}]", "", WORDS, ("the names in a list of pairs",), "the names in a list of pairs", "pair_names"),
    Source((("s/text/string", "text"),), "{0}", "", TEXT, ("the given string", "a string"), "a string", "string", weight=9),
    Source((("d/data/scores", "dict"),), "{0}", "", DICT, ("the given dictionary", "a dictionary"), "a dictionary", "dict", weight=6),
    Source(((_N, "large"),), "{0}", "", INT, ("the given number", "a number"), "a number", "number", weight=2),
    Source((("a/x", "small"), ("b/y", "small")), "{0} * {1}", "", INT, ("the product of two numbers",), "the product of two numbers", "product", weight=1.5),
    Source((("a/x", "count"), ("b/y", "count")), "math.gcd({0}, {1})", "", INT, ("the greatest common divisor of two numbers",), "the greatest common divisor of two numbers", "gcd", weight=1.5),
    Source((("a/x", "small"), ("b/y", "small")), "{0} ** 2 + {1} ** 2", "", INT, ("the sum of the squares of two numbers",), "the sum of the squares of two numbers", "squares"),
)  # fmt: skip

# The list and tuple sources share one set of argument names.
ARGUMENT_NAMES: Final = {"{a}": _NUMS}


def draw_arguments(kinds: tuple[str, ...], rng: random.Random) -> tuple[Any, ...]:
    """One set of random arguments for a function that takes the given input kinds."""
    return tuple(DRAWS[kind](rng) for kind in kinds)
