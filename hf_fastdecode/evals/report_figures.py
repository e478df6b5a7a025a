"""Figures of a report: accuracy against latency with n marked (Bifurcated attention, figure 8) and against n."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from ..measurement.figures import COLOURS, panel_axes, plain_numbers, powers_of_two
from .metrics import Ranker
from .report import SHOWN, Accuracy, Line, Report, accuracy_within, fastest, points

_SIDES: Final[dict[str, dict[str, Any]]] = {
    "shared": {"xytext": (-4, 3), "ha": "right", "va": "bottom"},
    "stock": {"xytext": (4, -3), "ha": "left", "va": "top"},
}
"""Where numbers stand beside the points of a way's line: above to the left, or below to the right."""


def unit_of(seconds: Iterable[float]) -> tuple[float, str]:
    return (1.0, "s") if max(seconds, default=0.0) >= 10 else (1e3, "ms")


def percents(axis: Any) -> None:
    """Show shares as percents (on ``axes.yaxis``), in steps whose numbers are short, so that none is rounded."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.6g}%"))


@dataclass(frozen=True)
class Mark:
    """The n of a point."""

    axis: Any
    point: tuple[float, float]  # in data coordinates
    n: int
    look: dict[str, Any]  # arguments of `annotate`
    is_end: bool  # of a line, whose marks are never left out


def place_marks(figure: Any, marks: Iterable[Mark]) -> None:
    """Write marks beside points when all else is drawn: ends first, and others unless they would cover one."""
    figure.draw_without_rendering()  # settles the layout, from which follows where things are
    taken: list[Any] = []
    for mark in sorted(marks, key=lambda mark: not mark.is_end):
        name = f"n = {mark.n:,}" if mark.is_end else f"{mark.n:,}"
        text = mark.axis.annotate(name, mark.point, **mark.look, textcoords="offset points", fontsize=8)
        box = text.get_window_extent()
        if not mark.is_end and any(box.padded(4).overlaps(other) for other in taken):
            text.remove()
        else:
            taken.append(box)


AGAINST_LATENCY: Final = "accuracy-latency.png"
AGAINST_N: Final = "accuracy-n.png"

_COLOURS: Final = {
    ("shared", "eager"): COLOURS["eager"],
    ("shared", "graph"): COLOURS["graph"],
    ("stock", "eager"): COLOURS["stock"],
    ("stock", "graph"): "#7d8288",
}
_ALONE: Final = {"shared": COLOURS["shared"], "stock": "#80868b"}
_RANKERS: Final[dict[Ranker, tuple[str, str]]] = {
    "oracle": ("#1b7f5c", "-"),
    "mean_logp": ("#3b6fb6", "-"),
    "sum_logp": ("#8a5fb5", "--"),
    "votes": ("#d08a1d", "-."),
    "random": ("#80868b", ":"),
}

Panel = Callable[[Any], list[Mark]]
"""Draws into an axis and returns the marks that are placed when everything is drawn."""


def draw_against_latency(found: Report, path: Path) -> Path | None:
    """Draw accuracy against latency, accuracy within a time budget, and latency against n, for each device.

    Without accuracy: latency against n, of all samples and of a step. Returns None where nothing was timed.
    """
    accuracy = found.accuracy
    panels: list[Panel] = []
    devices = list(dict.fromkeys(line.device for line in found.lines))
    for device in devices:
        lines = [line for line in found.lines if line.device == device]
        where = f" on {device}" if len(devices) > 1 else ""
        timed: list[Panel] = [partial(_latency_panel, lines, where)]
        if accuracy is None:
            panels += [*timed, partial(_step_panel, lines, where)]
        else:
            shown = [ranker for ranker in SHOWN if ranker in accuracy.curves]
            panels += [partial(_figure_8, accuracy, ranker, lines, where) for ranker in shown]
            panels += [partial(_within_panel, accuracy, lines, where), *timed]
    title = f"{found.title}; {devices[0]}" if len(devices) == 1 else found.title
    return _draw(panels, title, path) if panels else None


def draw_against_n(found: Report, path: Path) -> Path | None:
    """Draw accuracy against n, a curve for each ranker; returns None where no sample was judged."""
    return None if found.accuracy is None else _draw([partial(_rankers_panel, found.accuracy)], found.title, path)


def _figure_8(accuracy: Accuracy, ranker: Ranker, lines: Sequence[Line], where: str, axis: Any) -> list[Mark]:
    curve, marks = accuracy.curves[ranker], list[Mark]()
    drawn = [(line, joined) for line in lines if (joined := points(accuracy, ranker, line))]
    scale, unit = unit_of(seconds for _, joined in drawn for _, seconds, _ in joined)
    best = [fastest(lines, way, lines[0].device) for way in ("shared", "stock")]
    for line, joined in drawn:
        look = _look(line, lines)
        axis.plot([scale * seconds for _, seconds, _ in joined], [value for _, _, value in joined], **look)
        if line in best:
            at = {n: index for index, n in enumerate(accuracy.ns)}
            intervals = [(scale * seconds, curve.lows[at[n]], curve.highs[at[n]]) for n, seconds, _ in joined]
            axis.fill_between(*zip(*sorted(intervals)), color=look["color"], alpha=0.10, linewidth=0)
            beside, ends = _SIDES[line.way] | {"color": look["color"]}, (joined[0][0], joined[-1][0])
            marks += [Mark(axis, (scale * seconds, value), n, beside, n in ends) for n, seconds, value in joined]
    _time_axis(axis, unit)
    _share_axis(axis, accuracy.short_label(ranker))
    axis.set_title(f"{accuracy.short_label(ranker)} against latency{where}", fontsize=10)
    return marks


def _within_panel(accuracy: Accuracy, lines: Sequence[Line], where: str, axis: Any) -> list[Mark]:
    best = [line for way in ("shared", "stock") if (line := fastest(lines, way, lines[0].device)) is not None]
    times = [seconds for line in best for _, seconds, _ in points(accuracy, "oracle", line)]
    scale, unit = unit_of(times)
    for line in best:
        for ranker, style in zip(SHOWN, ("-", "--")):
            steps = accuracy_within(accuracy, ranker, line) if ranker in accuracy.curves else []
            if steps:
                x = [scale * step.seconds for step in steps] + [scale * max(times) * 2]
                y = [step.value for step in steps] + [steps[-1].value]
                look = _look(line, lines) | {"linestyle": style, "marker": "", "label": "_"}
                axis.step(x, y, where="post", **look)
    _time_axis(axis, unit, "time budget")
    _share_axis(axis, "best accuracy in time")
    if "mean_logp" in accuracy.curves:
        keys = [axis.plot([], [], color="#444444", linestyle=style, label="_")[0] for style in ("-", "--")]
        axis.legend(keys, [accuracy.short_label(name) for name in SHOWN], fontsize=8, frameon=False, loc="best")
    axis.set_title(f"accuracy within a time budget{where}", fontsize=10)
    return []


def _latency_panel(lines: Sequence[Line], where: str, axis: Any) -> list[Mark]:
    scale, unit = unit_of(row.last_sample_s for line in lines for row in line.rows)
    for line in lines:
        look, n = _look(line, lines), [row.n for row in line.rows]
        middle = [scale * row.last_sample_s for row in line.rows]
        late = [scale * row.last_sample_s_p90 for row in line.rows]
        axis.plot(n, middle, **look)
        axis.fill_between(n, middle, late, color=look["color"], alpha=0.25, linewidth=0)
    return _log_axes(axis, lines, f"until the last sample, {unit} (p50, shaded to p90)", f"latency against n{where}")


def _step_panel(lines: Sequence[Line], where: str, axis: Any) -> list[Mark]:
    for line in lines:
        axis.plot([row.n for row in line.rows], [row.ms_per_step_p50 for row in line.rows], **_look(line, lines))
    return _log_axes(axis, lines, "a decode step, ms (p50)", f"time of a step against n{where}")


def _log_axes(axis: Any, lines: Sequence[Line], label: str, title: str) -> list[Mark]:
    _samples_axis(axis, [row.n for line in lines for row in line.rows])
    axis.set_yscale("log")
    axis.set_ylabel(label, fontsize=9)
    plain_numbers(axis.yaxis)
    axis.set_title(title, fontsize=10)
    return []


def _rankers_panel(accuracy: Accuracy, axis: Any) -> list[Mark]:
    for ranker, (colour, style) in _RANKERS.items():
        curve = accuracy.curves.get(ranker)
        if curve is not None:
            look = {"color": colour, "linestyle": style, "linewidth": 1.8, "marker": "o", "markersize": 3.5}
            axis.plot(accuracy.ns, curve.values, **look, label=accuracy.label(ranker))
            if ranker in SHOWN:
                axis.fill_between(accuracy.ns, curve.lows, curve.highs, color=colour, alpha=0.12, linewidth=0)
    _samples_axis(axis, accuracy.ns)
    _share_axis(axis, "tasks solved")
    axis.set_title("accuracy against n (shaded: 95 % interval over tasks)", fontsize=10)
    return []


def _look(line: Line, lines: Sequence[Line]) -> dict[str, Any]:
    alone = sum(other.way == line.way for other in lines) == 1
    colour = _ALONE[line.way] if alone else _COLOURS[line.way, line.mode]
    return {"color": colour, "marker": "o", "markersize": 4, "linewidth": 1.8, "label": line.label}


def _time_axis(axis: Any, unit: str, name: str = "latency until the last of n samples") -> None:
    axis.set_xscale("log")
    axis.margins(x=0.12)  # for the numbers beside points
    axis.set_xlabel(f"{name}, {unit}", fontsize=9)
    plain_numbers(axis.xaxis)


def _samples_axis(axis: Any, ns: Sequence[int]) -> None:
    ticks = sorted({n for n in ns if n & (n - 1) == 0} or set(ns))
    powers_of_two(axis, ticks, [f"{tick:,}" for tick in ticks])
    axis.set_xlabel("n, samples of a task", fontsize=9)


def _share_axis(axis: Any, name: str) -> None:
    axis.set_ylim(max(0.0, axis.get_ylim()[0]), min(1.02, axis.get_ylim()[1]))
    percents(axis.yaxis)
    axis.set_ylabel(name, fontsize=9)


def _draw(panels: Sequence[Panel], title: str, path: Path) -> Path:
    columns = min(2, len(panels))
    lines = -(-len(panels) // columns)
    size = (5.2 * columns, 3.6 * lines + 0.8) if columns > 1 else (6.4, 4.6)
    marks: list[Mark] = []
    finish = partial(place_marks, marks=marks)
    with panel_axes(len(panels), columns, size, path, title, letters_per_inch=11, finish=finish) as axes:
        for axis, panel in zip(axes, panels, strict=True):
            marks += panel(axis)
    return path
