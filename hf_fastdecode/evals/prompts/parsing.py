"""What of a cut-off Python program still is one."""

from __future__ import annotations

import ast
import warnings


def parses(program: str) -> bool:
    """Whether a text is a Python program."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings, which are the program's matter
            ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def longest_parsing_prefix(text: str, stem: str = "") -> str:
    """The longest prefix in whole lines with which the stem is a program; the text itself if there is none.

    Args:
        text: A completion that may have been cut off.
        stem: The code that it continues.
    """
    lines = text.splitlines(keepends=True)
    for count in range(len(lines), 0, -1):
        prefix = "".join(lines[:count])
        if prefix.strip() and parses(stem + prefix):
            return prefix
    return text
