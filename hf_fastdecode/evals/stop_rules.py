"""The end of a completion, decided while it is generated: stop words, or the end of a function, by indentation in
Python and by braces in Java and JavaScript.
"""

from __future__ import annotations

import ast
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Literal

from .records import Language

Kind = Literal["word", "punctuation", "string", "comment"]


@dataclass(frozen=True)
class Token:
    kind: Kind  # numbers are words; regular expressions and pieces of template literals are strings
    text: str
    start: int  # position in the text

    @property
    def end(self) -> int:
        return self.start + len(self.text)


_Rule = tuple[Kind, re.Pattern[str], re.Pattern[str]]
"""A kind, how its tokens begin, and a whole one: where only a prefix matches, more text has to come."""


def _rule(kind: Kind, opening: str, whole: str = "(?!)") -> _Rule:
    return kind, re.compile(opening), re.compile(whole, re.S)


# A line's end closes a quoted string too: the program is wrong there, and what follows is code again.
_QUOTED: Final = [_rule("string", quote, rf"{quote}(?:\\.|[^{quote}\\\n])*(?:{quote}|\n)") for quote in "\"'"]
_LONG: Final = [_rule("string", quote, rf"{quote}(?:\\.|[^\\])*?{quote}") for quote in ('"""', "'''")]
_EMPTY_OR_LONG: Final = _rule("string", r"\"{1,2}\Z|'{1,2}\Z")
_WORD: Final = _rule("word", r"[\w$]", r"[\w$]++(?!\Z)")
_COMMENTS: Final = [
    *(_rule("comment", "//", r"//[^\n]*(?=\n)"), _rule("comment", r"/\*", r"/\*.*?\*/")),
    _rule("punctuation", r"/\Z"),
]
_TEMPLATE: Final = r"(?:\\.|[^`\\$]|\$(?!\{)(?=.))*(?:`|\$\{)"
_RULES: Final[dict[Language, list[_Rule]]] = {
    "python": [*_LONG, _EMPTY_OR_LONG, *_QUOTED, _WORD, _rule("comment", "#", r"#[^\n]*(?=\n)")],
    "java": [_LONG[0], _EMPTY_OR_LONG, *_QUOTED, _WORD, *_COMMENTS],
    "javascript": [
        *(*_QUOTED, _rule("string", "`", f"`{_TEMPLATE}"), _WORD, *_COMMENTS),
        # Distinct from +, since a slash after i++ divides.
        *(_rule("punctuation", r"[+-]\Z"), _rule("punctuation", r"\+\+|--", r"\+\+|--")),
    ],
}
_SPACE: Final = re.compile(r"\s*")
_REST_OF_TEMPLATE: Final = re.compile("}" + _TEMPLATE, re.S)
_REGEX_OPENING: Final = re.compile(r"/[^/*]", re.S)
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
        """Yield the tokens that have become certain in the whole text so far, which begins with that of last time."""
        while token := self._next(text):
            self._position = token.end
            if token.kind != "comment":
                self._remember(token)
            yield token

    def _next(self, text: str) -> Token | None:
        space = _SPACE.match(text, self._position)
        self._position = start = space.end() if space else self._position
        if start == len(text):
            return None
        if self._templates and self._templates[-1] == 0 and text[start] == "}":
            found = _REST_OF_TEMPLATE.match(text, start)
            return Token("string", found[0], start) if found else None
        if self.language == "javascript" and _REGEX_OPENING.match(text, start) and self._regex_may_follow():
            if (found := _REGEX.match(text, start)) is None:
                return None
            if not found[0].endswith("\n"):
                return Token("string", found[0], start)
        for kind, opening, whole in _RULES[self.language]:
            if opening.match(text, start):
                found = whole.match(text, start)
                return Token(kind, found[0], start) if found else None
        return Token("punctuation", text[start], start)

    def _regex_may_follow(self) -> bool:
        """Whether a slash begins a regular expression: it does where a value is expected."""
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
    """Return the tokens of a whole program; one that is not closed at its end is left out."""
    finished = text if text.endswith("\n") else text + "\n"  # no token reaches over it unless it is unclosed
    return list(Lexer(language).feed(finished))


class StopRule(ABC):
    """Finds the end of one completion; an instance for each row.

    Once a text is finished, each of its continuations is, and ends at the same place. What was read of the text of the
    call before is not read again, so asking after each token costs what the new characters cost.

    The completion of a finished text is that of all its continuations: it does not depend on when generation stopped.
    """

    _read = ""
    _end: int | None = None

    def finished(self, text: str) -> bool:
        """Whether nothing that may follow this text belongs to the completion."""
        return self.end(text) is not None

    def end(self, text: str) -> int | None:
        """Return the length of the completion in characters of the text; None while it may go on."""
        if not text.startswith(self._read):  # another text, or a letter whose bytes were not complete
            self._restart()
        if self._end is None:
            self._end = self._find(text)
            self._read = text
        return self._end

    def kept(self, text: str) -> int:
        """Return how many characters of a text its completion keeps, also where generation was cut off."""
        end = self.end(text)
        return len(text) if end is None else end

    def completion(self, text: str) -> str:
        """Return the kept characters, closed where the rule closes them."""
        return text[: self.kept(text)]

    def _restart(self) -> None:
        """Forget the text."""
        self._read, self._end = "", None

    @abstractmethod
    def _find(self, text: str) -> int | None:
        """Find the end of a text that begins with that of the call before."""


class Unbounded(StopRule):
    def _find(self, text: str) -> int | None:
        return None


class StopWords(StopRule):
    """Ends before the first of some words.

    Python that does not parse, such as a cut-off text, may be `repaired`: it loses its last lines until it does. No
    word lies within another, past its first character: more text could bring an earlier end.
    """

    def __init__(self, words: Sequence[str], *, repaired: bool = False):
        self._repaired = repaired
        self._longest = max(map(len, words))
        self._pattern = re.compile("|".join(map(re.escape, sorted(words, key=len))))
        self._searched = 0

    def kept(self, text: str) -> int:
        kept = super().kept(text)
        return len(longest_parsing_prefix(text[:kept])) if self._repaired else kept

    def _restart(self) -> None:
        super()._restart()
        self._searched = 0

    def _find(self, text: str) -> int | None:
        match = self._pattern.search(text, self._searched)
        self._searched = max(0, len(text) - self._longest + 1)
        return match.start() if match else None


def parses(program: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of escapes in strings, which are the program's matter
            ast.parse(program)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def longest_parsing_prefix(text: str, stem: str = "") -> str:
    """Return the longest prefix in whole lines that parses after the stem; the text itself if there is none."""
    lines = text.splitlines(keepends=True)
    for count in range(len(lines), 0, -1):
        prefix = "".join(lines[:count])
        if prefix.strip() and parses(stem + prefix):
            return prefix
    return text


_OPEN: Final = frozenset("([{")
_CLOSED: Final = frozenset(")]}")
_DEFINITIONS: Final = frozenset({"def", "class"})
_NEVER_IN_BRACKETS: Final = frozenset({"def", "class", "import"})


class PythonFunctionEnd(StopRule):
    """Ends a function's body at the next statement or comment that is not indented.

    Definitions that the text uses by name may still follow, such as a helper function; and, before the body, imports
    and the function's definition where a model writes it again.
    """

    def __init__(self, stem: str, entry_point: str):
        self._entry_point = entry_point
        self._stem = stem
        self._above = set(re.findall(r"^(?:async\s+)?(?:def|class)\s+(\w+)", stem, re.M))
        self._restart()

    def kept(self, text: str) -> int:
        return len(longest_parsing_prefix(text[: super().kept(text)], self._stem))

    def _restart(self) -> None:
        super()._restart()
        self._lexer = Lexer("python")
        self._depth = 0
        self._previous: Token | None = None
        self._body = False  # whether it has a statement
        self._head: list[Token] = []  # tokens of a statement that is not indented and not classified yet
        self._defined = set(self._above)

    def _find(self, text: str) -> int | None:
        for token in self._lexer.feed(text):
            if self._ends_with(token, text):
                return _line_start(text, self._head[0].start)
        return None

    def _ends_with(self, token: Token, text: str) -> bool:
        """Read a token: whether the function ended before the statement that it belongs to."""
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
        """Whether a statement that is not indented ends the function; decided by its first tokens."""
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
        return super().kept(text) if self.end(text) is not None or self._item_end is None else self._item_end

    def completion(self, text: str) -> str:
        kept = super().completion(text)
        still_open = self._opened + sum(map(_step, tokens(kept, self._language)))
        return kept if self._item_end is None else kept + "\n}" * still_open

    def _restart(self) -> None:
        super()._restart()
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
        """Count opened and closed braces and parentheses, and note the end of an item."""
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
        """Read a token between items: whether it ends the completion."""
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
    words = [token.text for token in header if token.kind == "word"]
    for keyword, name in pairwise(words):
        if keyword in _NAMED_BY_KEYWORD:
            return name
    return words[-1] if words else ""


def _may_define(token: Token, language: Language) -> bool:
    if language == "javascript":
        return token.text in ("function", "class", "async")
    return token.text == "@" or (token.kind == "word" and token.text not in ("import", "package"))


def _step(token: Token) -> int:
    if token.kind != "punctuation":
        return 0
    return (token.text == "{") - (token.text == "}")
