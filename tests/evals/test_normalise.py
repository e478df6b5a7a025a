"""The key of duplicates: layout and comments do not count, all else does."""

from __future__ import annotations

import pytest

from hf_fastdecode.evals.prompts import normalised
from hf_fastdecode.evals.task import Language

from .stems import PYTHON


@pytest.mark.parametrize(
    ("language", "one", "other"),
    [
        ("python", "def f(x):\n    return x+1", 'def f(x):  # adds\n  "adds"\n  return (x + 1)\n\n'),
        ("python", "x = 'a'", 'x = "a"'),
        ("python", "not Python (", "not Python (\n"),
        ("java", "return 2*x; }", "return 2 * x; // twice\n}\n"),
        ("javascript", "return a /* b */ / c }", "return a / c\n}"),
        ("javascript", "x = 1\ny = 2", "x = 1 // a\n\ny = 2"),
    ],
)
def test_same(language: Language, one: str, other: str) -> None:
    assert normalised(one, language) == normalised(other, language)


@pytest.mark.parametrize(
    ("language", "one", "other"),
    [
        ("python", "return x + 1", "return x - 1"),
        ("python", "not Python (", "not  Python ("),
        ("java", 'return "a b";', 'return "a  b";'),
        ("java", "int ab;", "int a b;"),
        ("java", 'return "a', 'return "b'),
        ("java", 'return """a', 'return """b'),
        ("javascript", "return\n1", "return 1"),
        ("javascript", "a\n++b", "a++\nb"),
        ("javascript", "return `a b`", "return `a  b`"),
    ],
)
def test_different(language: Language, one: str, other: str) -> None:
    assert normalised(one, language) != normalised(other, language)


def test_a_python_body_is_read_with_its_stem() -> None:
    one, other = "    return 2*x", "    return 2 * x  # twice\n"
    assert normalised(one, "python", PYTHON.stem) == normalised(other, "python", PYTHON.stem)
    assert normalised(one, "python", PYTHON.stem) != normalised("    return x", "python", PYTHON.stem)


def test_a_program_that_is_too_deep_for_the_parser() -> None:
    deep = "x = " + "(" * 5000 + ")" * 5000
    assert normalised(deep, "python") == deep
