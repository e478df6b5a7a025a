"""The report in a terminal."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .build import Report
from .words import accuracy_table, growth_lines, latency_tables, status_line


def report_text(found: Report) -> RenderableType:
    """Accuracy against n, latency against n and what a reader must know, as tables for a terminal."""
    parts: list[RenderableType] = [Text(found.title, style="bold")]
    if found.accuracy is not None:
        parts += [
            _table("accuracy, with 95 % intervals over tasks", *accuracy_table(found.accuracy)),
            Text(status_line(found.accuracy)),
        ]
    for device, cells in latency_tables(found).items():
        parts.append(_table(f"latency on {device}, medians over prompts", *cells))
    parts += [Text(line) for line in growth_lines(found)]
    parts += [Text(f"note: {note}", style="yellow") for note in found.notes]
    return Group(*parts)


def _table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    # Narrow, since a terminal may have 80 columns: no lines between columns.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.title, table.title_justify, table.title_style = Text(f"\n{title}"), "left", ""
    for name in head:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table
