"""The end of a Python function."""

from __future__ import annotations

import re
from typing import Final

from .lexers import Lexer, Token
from .parsing import longest_parsing_prefix
from .stop_rules import StopRule

_OPEN: Final = frozenset("([{")
_CLOSED: Final = frozenset(")]}")
_DEFINITIONS: Final = frozenset({"def", "class"})
_NEVER_IN_BRACKETS: Final = frozenset({"def", "class", "import"})


class PythonFunctionEnd(StopRule):
    """Ends a function's body at the next statement or comment that is not indented.

    What may still follow are definitions that the text uses by name, such as a helper function; and, before the body,
    imports and the function's own definition where a model writes it anew.

    Args:
        stem: The code that the text continues.
        entry_point: The function's name.
    """

    def __init__(self, stem: str, entry_point: str):
        super().__init__()
        self._entry_point = entry_point
        self._stem = stem
        self._above = set(re.findall(r"^(?:async\s+)?(?:def|class)\s+(\w+)", stem, re.M))
        self._restart()

    def kept(self, text: str) -> int:
        return len(longest_parsing_prefix(text[: super().kept(text)], self._stem))

    def _restart(self) -> None:
        self._lexer = Lexer("python")
        self._depth = 0
        self._previous: Token | None = None
        self._body = False  # whether it has a statement
        self._head: list[Token] = []  # tokens of a statement that is not indented and not judged yet
        self._defined = set(self._above)

    def _find(self, text: str) -> int | None:
        for token in self._lexer.feed(text):
            if self._ends_with(token, text):
                return _line_start(text, self._head[0].start)
        return None

    def _ends_with(self, token: Token, text: str) -> bool:
        """Reads a token; whether the function ended before the statement that it belongs to."""
        previous, self._previous = self._previous, token
        leads = self._leads_a_line(token, previous, text)
        if leads and token.text in _NEVER_IN_BRACKETS:
            self._depth = 0  # a bracket was never closed
        if leads and self._depth == 0:
            self._head = []
            if _line_start(text, token.start) == token.start:
                self._head = [token]
                return self._body if token.kind == "comment" else self._judge(text)
            self._body = self._body or token.kind != "comment"
        elif self._head and token.kind != "comment":
            self._head.append(token)
            return self._judge(text)
        if token.kind == "punctuation":
            self._depth += (token.text in _OPEN) - (token.text in _CLOSED and self._depth > 0)
        return False

    def _leads_a_line(self, token: Token, previous: Token | None, text: str) -> bool:
        if previous is None:
            return True
        between = text[previous.end : token.start]
        line_ended = "\n" in between or previous.text.endswith("\n")  # the latter in a string that was never closed
        return line_ended and previous.text != "\\"

    def _judge(self, text: str) -> bool:
        """Whether a statement that is not indented ends the function, as soon as its first tokens tell."""
        words = [token.text for token in self._head]
        if words[0] == "async":
            words = words[1:]
            if not words:
                return False
        if words[0] in ("import", "from") and not self._body:
            self._head = []
            return False
        if words[0] not in _DEFINITIONS:
            return True
        if len(words) < 2:
            return False
        name = words[1]
        used = re.search(rf"\b{re.escape(name)}\b", text[: self._head[0].start]) is not None
        anew = name == self._entry_point and not self._body
        if anew or (used and name not in self._defined):
            self._defined.add(name)
            self._head = []
            return False
        return True


def _line_start(text: str, position: int) -> int:
    return text.rfind("\n", 0, position) + 1
