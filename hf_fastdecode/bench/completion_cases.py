"""Growing completions as data: a call of `generate`, and the spans of its steps that are timed.

Nothing here needs torch, so that the command line can list cases at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .generate_cases import GenerateCase


@dataclass(frozen=True)
class CompletionCase:
    """A span of the steps of one call.

    Attributes:
        call: The call, whose samples all run to the end.
        marks: Numbers of tokens per sample at which time is taken, rising; the last one ends the call.
        index: Of the span, from ``marks[index]`` to ``marks[index + 1]``.
    """

    call: GenerateCase
    marks: tuple[int, ...]
    index: int

    @property
    def span(self) -> tuple[int, int]:
        """Tokens per sample at its beginning and at its end."""
        return self.marks[self.index], self.marks[self.index + 1]

    def kv_tokens(self) -> float:
        """Mean tokens per step whose keys and values must be read: each prompt's once, and each sample's own."""
        first, last = self.span
        return self.call.prompt_tokens + self.call.samples * (first + last) / 2

    def columns(self) -> dict[str, Any]:
        """Columns that identify the case."""
        first, last = self.span
        names = ("shape", "context", "samples", "new_tokens", "dtype")
        columns = self.call.columns()
        return {name: columns[name] for name in names} | {"from_token": first, "to_token": last}


def spans(call: GenerateCase, marks: Sequence[int]) -> list[CompletionCase]:
    """The cases of a call, one for each pair of neighbouring marks.

    Raises:
        ValueError: Fewer than two marks, or marks that do not rise from 1 to the call's tokens.
    """
    rising = all(before < after for before, after in pairwise(marks))
    if len(marks) < 2 or not rising or marks[0] < 1 or marks[-1] != call.new_tokens:
        raise ValueError(f"marks must be two or more, rising, and at least 1, got {','.join(map(str, marks))}")
    return [CompletionCase(call, tuple(marks), index) for index in range(len(marks) - 1)]
