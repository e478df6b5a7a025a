"""Tables of rows on stdout."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table


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
