"""The files of a report: metrics.json, curve.csv, pictures and a self-contained page; and its tables in a terminal."""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any, Final, get_args

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ..files import write_rows, write_text
from .records import Latency, Way
from .report import SHOWN, Accuracy, Curve, Line, Report, accuracy_within, fastest, largest_n_within, plural
from .report_figures import AGAINST_LATENCY, AGAINST_N, draw_against_latency, draw_against_n

Cells = tuple[list[str], list[list[str]]]
"""A table's head, where lines may break, and its rows."""


def accuracy_table(accuracy: Accuracy) -> Cells:
    """Make a row for each n and a column for each ranker; beside pass@n, its value if unjudged samples are right."""
    curves = {accuracy.label(ranker): curve for ranker, curve in accuracy.curves.items()}
    if accuracy.at_most is not None:
        (first, at_least), *others = curves.items()
        curves = {first: at_least, f"{first}, at most": accuracy.at_most, **dict(others)}
    head = ["n", *(label.replace(", ", ",\n") for label in curves)]
    rows = [[f"{n:,}", *(_percent(curve, at) for curve in curves.values())] for at, n in enumerate(accuracy.ns)]
    return head, rows


def latency_tables(found: Report) -> dict[str, Cells]:
    """Make a table for each device: a row for each measurement, times in seconds, and stock's time over shared's."""
    times = ["prefill,\ns", "ms/step", "first,\ns", "median,\ns", "last,\ns", "p90,\ns"]
    head = ["way", "mode", "n", *times, "peak,\nGiB", "stock/\nshared"]
    tables: dict[str, Cells] = {}
    for row in found.latency:
        gib = math.nan if row.peak_bytes is None else row.peak_bytes / 2**30
        seconds = [row.prefill_s, row.ms_per_step_p50, row.first_sample_s, row.median_sample_s, row.last_sample_s]
        cells = [row.way, row.mode, f"{row.n:,}", *map(_number, [*seconds, row.last_sample_s_p90, gib])]
        if row.status != "ok":
            cells[head.index("last,\ns")] = "none"
        tables.setdefault(row.device, (head, []))[1].append([*cells, _ratio(row, found)])
    return tables


def growth_lines(found: Report) -> list[str]:
    """Say how many samples fit into twice the latency of one, a sentence for each line."""
    return [
        f"{line.label} on {line.device}: {plural(n, 'sample')} within twice the latency of one"
        for line in found.lines
        if (n := largest_n_within(line)) is not None
    ]


def task_table(accuracy: Accuracy) -> Cells:
    rows = [
        [task.task_id, f"{task.samples:,}", f"{task.passed:,}", f"{task.distinct:,}", f"{task.distinct_passed:,}"]
        for task in accuracy.tasks
    ]
    return ["task", "samples", "passed", "distinct", "distinct, passed"], rows


def status_line(accuracy: Accuracy) -> str:
    return "verdicts: " + ", ".join(f"{count:,} {status}" for status, count in accuracy.statuses.items())


def _percent(curve: Curve, at: int) -> str:
    """Show a value, with its interval if it is set against latency, or with the error of an estimate."""
    value, low, high = (100 * values[at] for values in (curve.values, curve.lows, curve.highs))
    if curve.errors is not None:
        return f"{value:.1f}% ± {100 * curve.errors[at]:.1f}"
    return f"{value:.1f}%" + (f" [{low:.0f}, {high:.0f}]" if curve.ranker in SHOWN and not math.isnan(low) else "")


def _ratio(row: Latency, found: Report) -> str:
    if row.way != "shared":
        return ""
    stock = [other for other in found.latency if (other.way, other.device, other.n) == ("stock", row.device, row.n)]
    same = [other for other in stock if other.mode == row.mode] or (stock if len(stock) == 1 else [])
    return f"{same[0].last_sample_s / row.last_sample_s:.1f}x" if same and same[0].status == "ok" else ""


def _number(value: float) -> str:
    """Show at least three significant digits; empty where unknown."""
    if math.isnan(value):
        return ""
    return f"{value:,.{0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3}f}"


def report_text(found: Report) -> Group:
    """Show accuracy, latency and notes as tables for a terminal."""
    parts: list[RenderableType] = [Text(found.title, style="bold")]
    if found.accuracy is not None:
        parts += [
            _terminal_table("accuracy, with 95 % intervals over tasks", *accuracy_table(found.accuracy)),
            Text(status_line(found.accuracy)),
        ]
    for device, cells in latency_tables(found).items():
        parts.append(_terminal_table(f"latency on {device}, medians over prompts", *cells))
    parts += [Text(line) for line in growth_lines(found)]
    parts += [Text(f"note: {note}", style="yellow") for note in found.notes]
    return Group(*parts)


def _terminal_table(title: str, head: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    # Narrow, since a terminal may have 80 columns: no lines between columns.
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.title, table.title_justify, table.title_style = Text(f"\n{title}"), "left", ""
    for name in head:
        table.add_column(Text(name), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


PAGE: Final = "report.html"

# The policy has a browser refuse to fetch anything, whatever a task's name might smuggle in.
_HEAD: Final = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
body {{ max-width: 68rem; margin: 2rem auto; padding: 0 1rem }}
img {{ max-width: 100%; height: auto }}
pre {{ overflow-x: auto; font-size: 0.87rem }}
</style>
"""
_LEGEND: Final = (
    "pass@n: some of n samples passes its tests; pass@top: one of the best-ranked distinct samples passes. Means over "
    "all subsets of n samples of each task's pool; ± is the standard error of an estimate by Monte Carlo. Latency is "
    "of separate calls of one prompt each, and joined to accuracy by n only; within a time budget, the most accurate "
    "n whose last sample is in time counts.\n"
)


def page(found: Report, pictures: Mapping[str, bytes]) -> str:
    """Write the page: pictures, which are PNG bytes by their descriptions, and what a wide terminal shows."""
    parts = [*report_text(found).renderables, Text(f"\n{_LEGEND}")]
    if found.accuracy is not None:
        parts.append(_terminal_table("tasks", *task_table(found.accuracy)))
    endless = Console(width=1 << 20)  # tables that do not fit would be cut, and lose columns
    width = max([120, *(endless.measure(part).maximum for part in parts if isinstance(part, Table))])
    console = Console(record=True, width=width, file=StringIO(), force_terminal=False)
    console.print(Group(*parts))
    settings = json.dumps(found.settings, indent=1, ensure_ascii=False)
    console.print(Text(f"\nsettings: {settings}"), soft_wrap=True)
    images = (
        f'<p><img alt="{escape(name)}" src="data:image/png;base64,{b64encode(picture).decode()}"></p>\n'
        for name, picture in pictures.items()
    )
    text = console.export_html(inline_styles=True, code_format="<pre>{code}</pre>\n")
    return f"{_HEAD.format(title=escape(found.title))}{''.join(images)}{text}</html>\n"


METRICS: Final = "metrics.json"
CURVE: Final = "curve.csv"


def write_report(found: Report, folder: Path) -> list[Path]:
    """Write metrics.json, curve.csv, the pictures and report.html into a folder, and return their paths."""
    pictures: dict[str, Path] = {}
    for name, file, draw in (
        ("accuracy against latency", AGAINST_LATENCY, draw_against_latency),
        ("accuracy against n", AGAINST_N, draw_against_n),
    ):
        if draw(found, folder / file) is not None:
            pictures[name] = folder / file
        else:
            (folder / file).unlink(missing_ok=True)  # of an earlier report, which had something to draw
    content = json.dumps(_known(metrics(found)), ensure_ascii=False, allow_nan=False, indent=1)
    return [
        write_text(folder / METRICS, content + "\n"),
        write_rows(folder / CURVE, list(curve_rows(found)), columns=("n", "device"), line_end="\n"),
        *pictures.values(),
        write_text(folder / PAGE, page(found, {name: picture.read_bytes() for name, picture in pictures.items()})),
    ]


def metrics(found: Report) -> dict[str, Any]:
    """Return the content of metrics.json, where unknown numbers are still NaN."""
    accuracy = found.accuracy
    named = [(line, {"device": line.device, "way": line.way, "mode": line.mode}) for line in found.lines]
    budgets = [
        {**names, "ranker": ranker, "steps": [asdict(step) for step in accuracy_within(accuracy, ranker, line)]}
        for line, names in named
        for ranker in SHOWN
        if accuracy is not None and ranker in accuracy.curves
    ]
    return {
        "settings": found.settings,
        "notes": list(found.notes),
        "accuracy": None if accuracy is None else _accuracy_fields(accuracy),
        "latency": [asdict(row) for row in found.latency],
        "largest_n_within_twice_the_latency_of_one": [{**names, "n": largest_n_within(line)} for line, names in named],
        "accuracy_within": budgets,
    }


def _accuracy_fields(accuracy: Accuracy) -> dict[str, Any]:
    return {
        "n": list(accuracy.ns),
        "curves": {
            ranker: {
                "label": accuracy.label(ranker),
                "values": curve.values,
                "low": curve.lows,
                "high": curve.highs,
                "monte_carlo_standard_error": curve.errors,
            }
            for ranker, curve in accuracy.curves.items()
        },
        "at_most": None if accuracy.at_most is None else accuracy.at_most.values,
        "statuses": accuracy.statuses,
        "tasks": [asdict(task) for task in accuracy.tasks],
    }


def _known(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _known(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_known(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def curve_rows(found: Report) -> Iterator[dict[str, Any]]:
    """Give a row for each device and n: pass@n and pass@top-m with intervals, seconds to the last sample by way.

    Of several modes of a way, the one that is the fastest at its largest n stands for it. Without latency there is one
    row for each n, and the device is empty.
    """
    accuracy, lines = found.accuracy, found.lines
    for device in list(dict.fromkeys(line.device for line in lines)) or [""]:
        ways: dict[Way, Line | None] = {way: fastest(lines, way, device) for way in get_args(Way)}
        timed = {row.n for line in ways.values() if line for row in line.rows}
        for n in sorted({*timed, *(accuracy.ns if accuracy else ())}):
            row: dict[str, Any] = {"n": n, "device": device}
            if accuracy is not None:
                row |= _accuracy_cells(accuracy, n)
            for way, line in ways.items():
                at = line.at(n) if line else None
                row[f"{way}_mode"] = line.mode if line else ""
                row[f"{way}_last_sample_s"] = _cell(at.last_sample_s if at else None)
                row[f"{way}_last_sample_s_p90"] = _cell(at.last_sample_s_p90 if at else None)
            yield row


def _accuracy_cells(accuracy: Accuracy, n: int) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for ranker in SHOWN:
        curve = accuracy.curves.get(ranker)
        if curve is not None:
            name = accuracy.short_label(ranker)
            at = accuracy.ns.index(n) if n in accuracy.ns else None
            for suffix, values in (("", curve.values), ("_low", curve.lows), ("_high", curve.highs)):
                cells[name + suffix] = _cell(None if at is None else values[at])
    return cells


def _cell(value: float | None) -> float | str:
    return "" if value is None or math.isnan(value) else value
