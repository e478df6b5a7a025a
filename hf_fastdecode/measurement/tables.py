"""Tables of measurements in Markdown, for files and documentation pages."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from .rows import Measurement


def markdown(names: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> str:
    """A Markdown table, with a note in a paragraph behind it."""
    table = "\n".join([*head(names), *map(line, rows)]) + "\n"
    return f"{table}\n{note}\n" if note else table


def head(names: Sequence[str]) -> list[str]:
    """The two lines that a Markdown table begins with."""
    return [line(names), "|" + "---|" * len(names)]


def line(cells: Sequence[str]) -> str:
    """A line of a Markdown table."""
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def by(rows: Iterable[Measurement], *columns: str) -> list[dict[str, Measurement]]:
    """The measurements of each case by way, in the order given; a case is what has the same values in `columns`."""
    cases: dict[tuple[str, ...], dict[str, Measurement]] = {}
    for row in rows:
        cases.setdefault(tuple(row.get(name, "") for name in columns), {})[row["way"]] = row
    return list(cases.values())


def cell(row: Measurement | None, shown: Callable[[Measurement], str]) -> str:
    """A number of a measurement, or the first words of its status where there is none; empty without a measurement."""
    if row is None:
        return ""
    return shown(row) if row["status"] == "ok" else row["status"].partition(":")[0]


def replace_between(text: str, markers: re.Pattern[str], made: Callable[[re.Match[str]], str]) -> tuple[str, int]:
    """Replace the lines between markers of a documentation page; returns the new page, and the number of places.

    The first group of `markers` is the opening marker's line, the last one the closing marker; `made` makes the lines
    between.
    """
    return markers.subn(lambda match: match[1] + made(match) + match[match.re.groups], text)
