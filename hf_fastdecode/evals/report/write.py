"""The files that a report is written as; metrics.json and curve.csv are made here."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, get_args

from ...files import write_rows, write_text
from ..records import Way
from .accuracy import SHOWN, Accuracy
from .build import Report
from .figures import AGAINST_LATENCY, AGAINST_N, draw_against_latency, draw_against_n
from .join import Line, accuracy_within, fastest, largest_n_within
from .page import PAGE, page

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
    return [
        write_metrics(found, folder / METRICS),
        write_rows(folder / CURVE, list(curve_rows(found)), columns=("n", "device"), line_end="\n"),
        *pictures.values(),
        write_text(folder / PAGE, page(found, {name: picture.read_bytes() for name, picture in pictures.items()})),
    ]


def write_metrics(found: Report, path: Path) -> Path:
    """Write everything as JSON: settings, curves with intervals, counts of each task, latency; unknown is null."""
    text = json.dumps(_known(metrics(found)), ensure_ascii=False, allow_nan=False, indent=1)
    return write_text(path, text + "\n")


def metrics(found: Report) -> dict[str, Any]:
    """What metrics.json holds; numbers may be NaN here."""
    accuracy, lines = found.accuracy, found.lines
    budgets = (
        []
        if accuracy is None
        else [
            {
                "device": line.device,
                "way": line.way,
                "mode": line.mode,
                "ranker": ranker,
                "steps": [asdict(step) for step in accuracy_within(accuracy, ranker, line)],
            }
            for line in lines
            for ranker in SHOWN
            if ranker in accuracy.curves
        ]
    )
    return {
        "settings": found.settings,
        "notes": list(found.notes),
        "accuracy": None if accuracy is None else _accuracy(accuracy),
        "latency": [asdict(row) for row in found.latency],
        "largest_n_within_twice_the_latency_of_one": [
            {"device": line.device, "way": line.way, "mode": line.mode, "n": largest_n_within(line)} for line in lines
        ],
        "accuracy_within": budgets,
    }


def _accuracy(accuracy: Accuracy) -> dict[str, Any]:
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
    """Without NaN, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _known(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_known(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def curve_rows(found: Report) -> Iterator[dict[str, Any]]:
    """A row for each device and n: pass@n and pass@top-m with their intervals, seconds to the last sample by way.

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
            place = accuracy.ns.index(n) if n in accuracy.ns else None
            for suffix, values in (("", curve.values), ("_low", curve.lows), ("_high", curve.highs)):
                cells[name + suffix] = _cell(None if place is None else values[place])
    return cells


def _cell(value: float | None) -> float | str:
    return "" if value is None or math.isnan(value) else value
