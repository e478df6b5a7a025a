"""When two completions are the same candidate."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from typing import Final, Literal

Deduplicate = Literal["text", "ast"]
"""By equal texts, or by equal Python syntax trees."""


def text_key(completion: str) -> str:
    """The text itself."""
    return completion


def ast_key(completion: str) -> tuple[str, ...]:
    """The Python syntax tree: comments, blank lines, quotes and parentheses make no difference; docstrings do.

    A completion that is no program by itself is tried as the body of a function, since that is what continues a
    signature; bodies of other indentation differ, since not all of them go on where the signature's docstring stands.
    What cannot be parsed either way is told apart by its text.
    """
    body = completion.lstrip("\r\n")
    indentation = body[: len(body) - len(body.lstrip(" \t"))]
    for program, more in ((completion, ()), (f"def _():\n{completion}", (indentation,))):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes, for each completion that has them
                return "ast", ast.dump(ast.parse(program)), *more
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a null byte
            continue
    return "text", completion


KEYS: Final[dict[Deduplicate, Callable[[str], str | tuple[str, ...]]]] = {"text": text_key, "ast": ast_key}
"""Functions from a completion to a key that is equal for duplicates."""
