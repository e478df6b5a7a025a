"""Tables of measurements in Markdown, for files and documentation pages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
