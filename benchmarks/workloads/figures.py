"""Figures of workloads: bars by level of sharing (Hydragen, figure 7), time against questions (figure 6)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hf_fastdecode.measurement.figures import (
    COLOURS,
    add_legend,
    add_title,
    new_figure,
    plain_numbers,
    powers_of_two,
    save,
    style_axis,
)
from hf_fastdecode.measurement.rows import Measurement

from .cases import LEVELS, WAYS

_COLOURS: Final = {
    **{"none": COLOURS["stock"], "few-shot": "#8a5fb5", "problem": "#3b6fb6", "two-level": COLOURS["shared"]},
    **{"stock": COLOURS["stock"], "shared": COLOURS["shared"]},
}
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20))


def draw_levels(rows: Sequence[Measurement], path: Path) -> Path:
    """Draw bars of seconds, prefill below decode, and of keys and values, for each point and level."""
    points = list(dict.fromkeys((int(row["problems"]), int(row["samples"])) for row in rows))
    levels = [level for level in LEVELS if any(row["way"] == level for row in rows)]
    figure, (time, memory) = _figure()
    unit, bytes_of_it = _unit(rows)
    width = 0.8 / len(levels)
    for row in rows:
        colour, label = _COLOURS[row["way"]], LEVELS[row["way"]].words
        place = points.index((int(row["problems"]), int(row["samples"])))
        x = place + (levels.index(row["way"]) - (len(levels) - 1) / 2) * width
        if row["status"] != "ok":
            for axis in (time, memory):
                axis.text(
                    x, 0, f" {row['status'].partition(':')[0]}", rotation=90, ha="center", va="bottom", fontsize=8
                )
            continue
        prefill, decode = float(row["prefill_s"]), max(0.0, float(row["decode_s"]))
        time.bar(x, prefill, width, color=colour, alpha=0.45, hatch="///", edgecolor="white")
        time.bar(x, decode, width, bottom=prefill, color=colour, label=label)
        memory.bar(x, int(row["kv_bytes"]) / bytes_of_it, width, color=colour)
    time.set_ylabel("seconds of a call (hatched: prefill)", fontsize=9)
    memory.set_ylabel(f"keys and values, {unit}", fontsize=9)
    for axis in (time, memory):
        axis.set_xticks(range(len(points)), [f"{problems} problems\nx {samples}" for problems, samples in points])
        axis.set_xlim(-0.5, len(points) - 0.5)
    title = (
        f"tasks {rows[0]['task']}, {rows[0]['shots']} examples: {rows[0]['shared_tokens']} tokens of up to "
        f"{rows[0]['prompt_tokens']} shared by all rows; {rows[0]['new_tokens']} new tokens; {_where(rows)}"
    )
    return _finish(figure, title, path)


def draw_questions(rows: Sequence[Measurement], path: Path) -> Path:
    """Draw seconds against the number of questions: of the whole call, and without prefill as in the paper."""
    figure, axes = _figure()
    for axis, column in zip(axes, ("total_s", "decode_s"), strict=True):
        for way, label in WAYS.items():
            own = sorted((row for row in rows if row["way"] == way), key=lambda row: int(row["questions"]))
            shown = [row for row in own if row["status"] == "ok" and float(row[column]) > 0]
            lost = [int(row["questions"]) for row in own if row["status"].startswith("out of memory")]
            look = {"color": _COLOURS[way], "label": label, "marker": "o", "markersize": 4, "linewidth": 1.8}
            axis.plot([int(row["questions"]) for row in shown], [float(row[column]) for row in shown], **look)
            if lost:  # at the upper edge
                look |= {"label": f"{label}: out of memory", "marker": "x", "markersize": 7, "linestyle": ""}
                axis.plot(lost, [0.97] * len(lost), **look, transform=axis.get_xaxis_transform())
        axis.set_yscale("log")
        ticks = sorted({int(row["questions"]) for row in rows})
        powers_of_two(axis, ticks, [f"{tick:,}" for tick in ticks])
        axis.set_xlabel("questions at once", fontsize=9)
        axis.set_ylabel("seconds of a call" if column == "total_s" else "seconds without prefill", fontsize=9)
        plain_numbers(axis.yaxis)
    title = (
        f"{rows[0]['prefix_tokens']} tokens of text and solved questions, {rows[0]['new_tokens']} new tokens a row; "
        f"{_where(rows)}"
    )
    return _finish(figure, title, path)


def _figure() -> tuple[Any, list[Any]]:
    return new_figure(2, 2, (10.4, 4.4))


def _finish(figure: Any, title: str, path: Path) -> Path:
    for axis in figure.axes:
        style_axis(axis)
        axis.set_axisbelow(True)
    add_title(figure, title)
    add_legend(figure, columns=4)
    return save(figure, path)


def _unit(rows: Sequence[Measurement]) -> tuple[str, int]:
    most = max((int(row["kv_bytes"]) for row in rows if row["status"] == "ok"), default=0)
    return next((unit for unit in _UNITS if most >= unit[1]), _UNITS[-1])


def _where(rows: Sequence[Measurement]) -> str:
    return f"{rows[0]['model']} in {rows[0]['dtype']} on {rows[0]['device']}"
