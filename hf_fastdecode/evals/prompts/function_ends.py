"""Where a function ends: by indentation in Python, by braces in Java and JavaScript."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Final, Literal

from ..records import Language
from .lexers import Lexer, Token, tokens
from .stop_rules import StopRule, longest_parsing_prefix

_OPEN: Final = frozenset("([{")
_CLOSED: Final = frozenset(")]}")
_DEFINITIONS: Final = frozenset({"def", "class"})
_NEVER_IN_BRACKETS: Final = frozenset({"def", "class", "import"})


class PythonFunctionEnd(StopRule):
    """Ends a function's body at the next statement or comment that is not indented.

    Definitions that the text uses by name may still follow, such as a helper function; and, before the body, imports
    and the function's own definition where a model writes it again.
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


_NAMED_BY_KEYWORD: Final = frozenset({"class", "interface", "enum", "record", "function"})
_HEADER_ENDS: Final = frozenset({"{", ";", "=", "("})
_NO_NAME: Final = frozenset({"", "static"})  # a header of static alone is an initialiser's
_LONGEST_HEADER: Final = 40  # tokens; prose has no end of a header


class BraceEnd(StopRule):
    """Ends once the brace that the stem's last line opened is closed; a ValueError for a stem that leaves none open.

    The braces that close the stem's other blocks may still follow, such as the class around a Java method, and
    definitions that the text uses by name: methods, fields and classes in Java, functions and classes in JavaScript.
    """

    def __init__(self, language: Language, stem: str, entry_point: str):
        super().__init__()
        self._language = language
        above = tokens(stem, language)
        self._opened = sum(map(_step, above))
        if self._opened < 1:
            raise ValueError(
                f"a stem must leave a brace open, got {self._opened} in {stem[-80:]!r}; its program is whole"
            )
        self._above = {entry_point, *(after.text for token, after in pairwise(above) if token.text == "class")}
        self._restart()

    def kept(self, text: str) -> int:
        end = self.end(text)
        if end is None:
            end = self._item_end
        return len(text) if end is None else end

    def completion(self, text: str) -> str:
        """What is kept, and the braces that close the stem's other blocks."""
        kept = super().completion(text)
        still_open = self._opened + sum(map(_step, tokens(kept, self._language)))
        return kept if self._item_end is None else kept + "\n}" * still_open

    def _restart(self) -> None:
        self._lexer = Lexer(self._language)
        self._depth = self._opened
        self._parentheses = 0
        self._item: Literal["block", "statement"] | None = "block"
        self._level = self._opened - 1  # braces open around the item
        self._item_end: int | None = None
        self._header: list[Token] = []
        self._defined = set(self._above)

    def _find(self, text: str) -> int | None:
        for token in self._lexer.feed(text):
            if token.kind == "comment":
                continue
            if self._item is None and self._ends_with(token, text):
                return self._item_end
            self._follow(token)
        return None

    def _follow(self, token: Token) -> None:
        """Counts what a token opens and closes, and notes the end of an item."""
        self._depth += _step(token)
        if token.kind != "punctuation":
            return
        self._parentheses += (token.text in "([") - (token.text in ")]" and self._parentheses > 0)
        if self._item is None:
            if token.text == "}" and not self._header:
                self._level = self._depth
                self._close(token)
        elif self._depth == self._level and (
            (token.text == "}" and self._item == "block") or (token.text == ";" and not self._parentheses)
        ):
            self._close(token)

    def _close(self, token: Token) -> None:
        self._item, self._item_end, self._parentheses = None, token.end, 0

    def _ends_with(self, token: Token, text: str) -> bool:
        """Reads a token between items; whether it ends the completion."""
        if not self._header:
            if token.text == "}":
                return self._depth == 0
            if token.text == ";":
                return False
            if not _may_define(token, self._language):
                return True
        self._header.append(token)
        if token.text not in _HEADER_ENDS:
            return len(self._header) > _LONGEST_HEADER or token.text == "}"
        name = _name(self._header)
        kept = text[: self._item_end]
        if name in self._defined | _NO_NAME or not re.search(rf"(?<![\w$]){re.escape(name)}(?![\w$])", kept):
            return True
        self._defined.add(name)
        self._item = "statement" if token.text in ";=" else "block"
        self._level = self._depth
        self._header = []
        return False


def _name(header: list[Token]) -> str:
    """What a header defines: the word after class or its like, else the last word before its end."""
    words = [token.text for token in header if token.kind == "word"]
    for keyword, name in pairwise(words):
        if keyword in _NAMED_BY_KEYWORD:
            return name
    return words[-1] if words else ""


def _may_define(token: Token, language: Language) -> bool:
    """Whether a definition may begin with a token."""
    if language == "javascript":
        return token.text in ("function", "class", "async")
    return token.text == "@" or (token.kind == "word" and token.text not in ("import", "package"))


def _step(token: Token) -> int:
    if token.kind != "punctuation":
        return 0
    return (token.text == "{") - (token.text == "}")
