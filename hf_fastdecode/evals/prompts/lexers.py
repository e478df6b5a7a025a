"""Tokens of a program that is still being written: Python, Java and JavaScript.

A lexer is given a text that grows and yields a token once no continuation can change it: a word when a character
follows that cannot belong to it, a string when it is closed. So what is read of a prefix is read of the whole text
too, which makes rules over tokens usable as stop rules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, Literal

from ..records import Language

Kind = Literal["word", "punctuation", "string", "comment"]


@dataclass(frozen=True)
class Token:
    """A piece of a program; white space is not a token."""

    kind: Kind  # numbers are words; regular expressions and pieces of template literals are strings
    text: str
    start: int  # position in the text

    @property
    def end(self) -> int:
        """Where the text goes on after it."""
        return self.start + len(self.text)


# A pattern matches a whole token. Where an opening one matches and the pattern does not, the token is not closed yet.
_SPACE: Final = re.compile(r"\s+")
_WORD: Final = re.compile(r"[\w$]+")
_DOUBLED: Final = re.compile(r"\+\+|--")  # distinct from +, since a slash after i++ divides
_LONG_QUOTES: Final = {
    '"""': re.compile(r'"""(?:\\.|[^\\])*?"""', re.S),
    "'''": re.compile(r"'''(?:\\.|[^\\])*?'''", re.S),
}
# A line's end closes a quoted string too: the program is wrong there, and what follows is code again.
_QUOTES: Final = {quote: re.compile(rf"{quote}(?:\\.|[^{quote}\\\n])*(?:{quote}|\n)", re.S) for quote in "\"'"}
_LINE_COMMENTS: Final = {"#": re.compile(r"#[^\n]*(?=\n)"), "//": re.compile(r"//[^\n]*(?=\n)")}
_BLOCK_COMMENT: Final = re.compile(r"/\*.*?\*/", re.S)
_TEMPLATE: Final = re.compile(r"(?:\\.|[^`\\$]|\$(?!\{)(?=.))*(?:`|\$\{)", re.S)
_REGEX: Final = re.compile(r"/(?:\\[^\n]|\[(?:\\[^\n]|[^\]\\\n])*\]|[^/\\\[\n])+/[\w$]*(?=[^\w$])|/[^\n]*\n")

_BEFORE_REGEX: Final = frozenset(
    "return typeof case in of delete void throw new instanceof do else yield await".split()
)
_BEFORE_CONDITION: Final = frozenset("if while for with".split())


@dataclass
class Lexer:
    """Reads a growing text of one language."""

    language: Language
    _position: int = 0
    _templates: list[int] = field(default_factory=list)  # per open ${: braces open within it
    _parentheses: list[bool] = field(default_factory=list)  # per open one: does it hold a condition
    _previous: Token | None = None
    _after_condition: bool = False

    def feed(self, text: str) -> Iterator[Token]:
        """The tokens that have become certain, given the whole text so far; it begins with that of the call before."""
        while token := self._next(text):
            self._position = token.end
            if token.kind != "comment":
                self._remember(token)
            yield token

    def _next(self, text: str) -> Token | None:
        if space := _SPACE.match(text, self._position):
            self._position = space.end()
        start = self._position
        if start == len(text):
            return None
        if self._templates and self._templates[-1] == 0 and text[start] == "}":
            return self._token("string", _TEMPLATE, text, start, skip=1)
        if text[start] == "`" and self.language == "javascript":
            return self._token("string", _TEMPLATE, text, start, skip=1)
        if text[start] in "\"'":
            return self._quoted(text, start)
        if _WORD.match(text[start]):
            return self._token("word", _WORD, text, start, closed=False)
        if text[start] == "#" and self.language == "python":
            return self._token("comment", _LINE_COMMENTS["#"], text, start)
        if text[start] == "/" and self.language != "python":
            return self._slash(text, start)
        if text[start] in "+-" and self.language == "javascript":
            if start + 1 == len(text):
                return None
            if _DOUBLED.match(text, start):
                return Token("punctuation", text[start : start + 2], start)
        return Token("punctuation", text[start], start)

    def _token(
        self, kind: Kind, pattern: re.Pattern[str], text: str, start: int, skip: int = 0, closed: bool = True
    ) -> Token | None:
        """The token that the pattern matches; None if more text may lengthen it."""
        match = pattern.match(text, start + skip)
        if match is None or (not closed and match.end() == len(text)):
            return None
        return Token(kind, text[start : match.end()], start)

    def _quoted(self, text: str, start: int) -> Token | None:
        quotes = text[start : start + 3]
        if quotes in _LONG_QUOTES and (self.language == "python" or (self.language == "java" and quotes == '"""')):
            return self._token("string", _LONG_QUOTES[quotes], text, start)
        if len(quotes) < 3 and quotes == quotes[0] * len(quotes) and self.language != "javascript":
            return None  # an empty string, or the first quotes of a long one
        return self._token("string", _QUOTES[text[start]], text, start)

    def _slash(self, text: str, start: int) -> Token | None:
        if start + 1 == len(text):
            return None
        if text.startswith("//", start):
            return self._token("comment", _LINE_COMMENTS["//"], text, start)
        if text.startswith("/*", start):
            return self._token("comment", _BLOCK_COMMENT, text, start)
        if self.language == "javascript" and self._regex_may_follow():
            found = self._token("string", _REGEX, text, start)
            if found is None or not found.text.endswith("\n"):
                return found
        return Token("punctuation", "/", start)

    def _regex_may_follow(self) -> bool:
        """Whether a slash begins a regular expression: where a value is expected, not after one."""
        before = self._previous
        if before is None:
            return True
        if before.kind == "word":
            return before.text in _BEFORE_REGEX
        if before.kind == "string":
            return before.text.endswith("${")
        return self._after_condition if before.text == ")" else before.text not in ("]", "++", "--")

    def _remember(self, token: Token) -> None:
        if token.kind == "string" and self.language == "javascript":
            if token.text[0] == "}" and self._templates:
                self._templates.pop()
            if token.text[0] in "`}" and token.text.endswith("${"):
                self._templates.append(0)
        elif token.kind == "punctuation":
            if token.text == "(":
                before = self._previous
                self._parentheses.append(before is not None and before.text in _BEFORE_CONDITION)
            elif token.text == ")":
                self._after_condition = self._parentheses.pop() if self._parentheses else False
            elif self._templates and token.text in "{}":
                self._templates[-1] += 1 if token.text == "{" else -1
        self._previous = token


def tokens(text: str, language: Language) -> list[Token]:
    """The tokens of a whole program; what is not closed at its end is left out."""
    finished = text if text.endswith("\n") else text + "\n"  # no token reaches over it unless it is unclosed
    return list(Lexer(language).feed(finished))
