"""Where a completion ends, decided while it is generated, and what of the text is kept."""

from __future__ import annotations

import ast
import re
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence


class StopRule(ABC):
    """Finds the end of one completion; an instance for each row.

    Once a text is finished, each of its continuations is, and ends at the same place. What was read of the text of the
    call before is not read again, so asking after each token costs what the new characters cost.

    The completion of a finished text is that of all its continuations: it does not depend on when generation stopped.
    """

    def __init__(self) -> None:
        self._read = ""
        self._end: int | None = None

    def finished(self, text: str) -> bool:
        """Whether nothing that may follow this text belongs to the completion."""
        return self.end(text) is not None

    def end(self, text: str) -> int | None:
        """Where the completion ends, as a number of characters of the text; None while it may go on."""
        if not text.startswith(self._read):  # another text, or a letter whose bytes were not complete
            self._read, self._end = "", None
            self._restart()
        if self._end is None:
            self._end = self._find(text)
            self._read = text
        return self._end

    def kept(self, text: str) -> int:
        """How many leading characters of a text its completion keeps, also where generation was cut off."""
        end = self.end(text)
        return len(text) if end is None else end

    def completion(self, text: str) -> str:
        """The completion that a text holds: what is kept, closed where the rule closes it."""
        return text[: self.kept(text)]

    @abstractmethod
    def _restart(self) -> None:
        """Forget what was read."""

    @abstractmethod
    def _find(self, text: str) -> int | None:
        """The end, given a text that begins with that of the call before."""


class Unbounded(StopRule):
    """Ends nowhere."""

    def _restart(self) -> None:
        pass

    def _find(self, text: str) -> int | None:
        return None


class StopWords(StopRule):
    """Ends before the first of some words.

    Python that does not parse, such as a cut-off text, may be `repaired`: it loses its last lines until it does. A
    word within another, past its beginning, is a ValueError: more text could bring an earlier end.
    """

    def __init__(self, words: Sequence[str], *, repaired: bool = False):
        super().__init__()
        self._repaired = repaired
        if not words or not all(words):
            raise ValueError(f"stop words must be texts of at least one character, got {list(words)}")
        if within := [(one, other) for one in words for other in words if one in other[1:]]:
            raise ValueError(f"stop word {within[0][0]!r} lies within {within[0][1]!r}; leave the longer one out")
        self._longest = max(map(len, words))
        self._pattern = re.compile("|".join(map(re.escape, sorted(words, key=len))))
        self._searched = 0

    def kept(self, text: str) -> int:
        kept = super().kept(text)
        return len(longest_parsing_prefix(text[:kept])) if self._repaired else kept

    def _restart(self) -> None:
        self._searched = 0

    def _find(self, text: str) -> int | None:
        match = self._pattern.search(text, self._searched)
        self._searched = max(0, len(text) - self._longest + 1)
        return match.start() if match else None


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
    """The longest prefix in whole lines that parses behind the stem; the text itself if there is none."""
    lines = text.splitlines(keepends=True)
    for count in range(len(lines), 0, -1):
        prefix = "".join(lines[:count])
        if prefix.strip() and parses(stem + prefix):
            return prefix
    return text
