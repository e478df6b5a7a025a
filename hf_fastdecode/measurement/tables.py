"""Tables of measurements: Markdown for files and documentation pages, and the same in a terminal."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import typer

from .rows import Measurement

if TYPE_CHECKING:
    from rich.table import Table


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


def show(text: str) -> None:
    """Print Markdown as it is, or in a terminal with tables whose headings wrap, where their cells fit.

    (rich's own Markdown cuts numbers off where a column is narrow.)
    """
    if not sys.stdout.isatty():
        return typer.echo(text)
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for is_table, found in groupby(text.splitlines(), lambda line: line.startswith("|")):
        lines = list(found)
        table = _fitted([_cells(line) for line in lines], console.width) if is_table else None
        console.print(table) if table else typer.echo("\n".join(lines))
    return None


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def _fitted(lines: Sequence[Sequence[str]], width: int) -> Table | None:
    """A table of a heading, a rule and rows, no wider than that; None when its cells are too wide."""
    from rich.table import Column, Table

    heading, _, *rows = lines
    cells = [max((len(cell) for cell in column), default=0) or 1 for column in zip(*rows, strict=True)]
    words = [max(map(len, name.split())) for name in heading]
    for longest in range(max(words), 0, -1):  # letters of a heading's word on one line; the longest words break first
        widths = [max(cell, min(word, longest)) for cell, word in zip(cells, words, strict=True)]
        if sum(widths) + len(widths) <= width:
            break
    else:
        return None
    columns = [
        Column(name, width=size, overflow="fold", justify="right") for name, size in zip(heading, widths, strict=True)
    ]
    table = Table(*columns, box=None, padding=(0, 0, 0, 1), header_style="bold")
    for row in rows:
        table.add_row(*row)
    return table
