"""The report in words: tables as text cells, for a page, and all of it for a terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..records import Latency
from .accuracy import SHOWN, Accuracy, Curve
from .build import Report
from .join import largest_n_within

Cells = tuple[list[str], list[list[str]]]
"""A table's head, where lines may break, and its rows."""


def accuracy_table(accuracy: Accuracy) -> Cells:
    """A row for each n, a column for each ranker; beside pass@n, what it is if unjudged samples are right."""
    curves = {accuracy.label(ranker): curve for ranker, curve in accuracy.curves.items()}
    if accuracy.at_most is not None:
        (first, own), *others = curves.items()
        curves = {first: own, f"{first}, at most": accuracy.at_most, **dict(others)}
    head = ["n", *(label.replace(", ", ",\n") for label in curves)]
    rows = [[f"{n:,}", *(_percent(curve, place) for curve in curves.values())] for place, n in enumerate(accuracy.ns)]
    return head, rows


def latency_tables(found: Report) -> dict[str, Cells]:
    """By device, a row for each measurement, times in seconds; beside a shared one, what stock takes over its time."""
    times = ["prefill,\ns", "ms/step", "first,\ns", "median,\ns", "last,\ns", "p90,\ns"]
    head = ["way", "mode", "n", *times, "peak,\nGiB", "stock/\nshared"]
    tables: dict[str, Cells] = {}
    for row in found.latency:
        cells = [
            row.way,
            row.mode,
            f"{row.n:,}",
            _number(row.prefill_s),
            _number(row.ms_per_step_p50),
            _number(row.first_sample_s),
            _number(row.median_sample_s),
            _number(row.last_sample_s) if row.status == "ok" else "none",
            _number(row.last_sample_s_p90),
            _number(math.nan if row.peak_bytes is None else row.peak_bytes / 2**30),
            _ratio(row, found),
        ]
        tables.setdefault(row.device, (head, []))[1].append(cells)
    return tables


def growth_lines(found: Report) -> list[str]:
    """How many samples fit into twice the latency of one, a sentence for each line."""
    return [
        f"{line.label} on {line.device}: {n:,} sample{'' if n == 1 else 's'} within twice the latency of one"
        for line in found.lines
        if (n := largest_n_within(line)) is not None
    ]


def task_table(accuracy: Accuracy) -> Cells:
    """A row for each task."""
    rows = [
        [task.task_id, f"{task.samples:,}", f"{task.passed:,}", f"{task.distinct:,}", f"{task.distinct_passed:,}"]
        for task in accuracy.tasks
    ]
    return ["task", "samples", "passed", "distinct", "distinct, passed"], rows


def status_line(accuracy: Accuracy) -> str:
    """Verdicts by status in a line."""
    return "verdicts: " + ", ".join(f"{count:,} {status}" for status, count in accuracy.statuses.items())


def _percent(curve: Curve, place: int) -> str:
    """A value, with its interval if it is one of those set against latency, or with the error of an estimate."""
    value, low, high = (100 * own[place] for own in (curve.values, curve.lows, curve.highs))
    if curve.errors is not None:
        return f"{value:.1f}% ± {100 * curve.errors[place]:.1f}"
    return f"{value:.1f}%" + (f" [{low:.0f}, {high:.0f}]" if curve.ranker in SHOWN and not math.isnan(low) else "")


def _ratio(row: Latency, found: Report) -> str:
    """Stock's latency over that of a shared row."""
    if row.way != "shared":
        return ""
    stock = [other for other in found.latency if (other.way, other.device, other.n) == ("stock", row.device, row.n)]
    same = [other for other in stock if other.mode == row.mode] or (stock if len(stock) == 1 else [])
    return f"{same[0].last_sample_s / row.last_sample_s:.1f}x" if same and same[0].status == "ok" else ""


def _number(value: float) -> str:
    """At least three digits that count; empty where unknown."""
    if math.isnan(value):
        return ""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


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
