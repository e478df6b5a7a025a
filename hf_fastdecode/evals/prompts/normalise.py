"""When two completions are the same program: a key to find duplicates by."""

from __future__ import annotations

import ast
import warnings
from itertools import pairwise
from typing import Final

from ..task import Language
from .lexers import Token, tokens

# JavaScript ends the statement where a line ends after one of these, so `return` alone on its line is another program.
_LINE_END_COUNTS: Final = frozenset({"return", "break", "continue", "throw", "yield"})

_DOCUMENTED: Final = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def normalised(completion: str, language: Language, stem: str = "") -> str:
    """A key that is equal for completions that differ in comments, docstrings and layout only.

    Args:
        completion: What continues the stem.
        language: Of the program.
        stem: The code before the completion, the same for all that are compared.

    Returns:
        The dumped syntax tree of Python that parses, else the completion as it stands but for white space at its end;
        the tokens of other languages.
    """
    return _tree(stem + completion) or completion.rstrip() if language == "python" else _stream(completion, language)


def _tree(program: str) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(program)
        for node in ast.walk(tree):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                del node.body[0]
        return ast.dump(tree)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _stream(completion: str, language: Language) -> str:
    found = [token for token in tokens(completion, language) if token.kind != "comment"]
    pieces = [
        token.text + ("\n" if _ends_a_line(token, following, completion, language) else "\0")
        for token, following in pairwise(found)
    ]
    everything = tokens(completion, language)
    unclosed = completion[everything[-1].end :] if everything else completion
    return "".join([*pieces, *(token.text for token in found[-1:]), unclosed.rstrip()])


def _ends_a_line(token: Token, following: Token, text: str, language: Language) -> bool:
    line_ends = "\n" in text[token.end : following.start]
    return (
        language == "javascript" and line_ends and (token.text in _LINE_END_COUNTS or following.text in ("++", "--"))
    )
