"""Marks of figures: numbers beside points, percents, limits and units of axes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

_SIDES: Final[dict[str, dict[str, Any]]] = {
    "l": {"xytext": (-5, 0), "ha": "right", "va": "center"},
    "r": {"xytext": (5, 0), "ha": "left", "va": "center"},
    "a": {"xytext": (0, 5), "ha": "center", "va": "bottom"},
    "b": {"xytext": (0, -5), "ha": "center", "va": "top"},
    "A": {"xytext": (-4, 3), "ha": "right", "va": "bottom"},
    "B": {"xytext": (4, -3), "ha": "left", "va": "top"},
}
"""Left, right, above and below of a point; above to the left, below to the right."""


def unit_of(seconds: Iterable[float]) -> tuple[float, str]:
    """The factor and the name of the unit in which times read best."""
    return (1.0, "s") if max(seconds, default=0.0) >= 10 else (1e3, "ms")


def percents(axis: Any) -> None:
    """Shares as percents (of ``axes.yaxis``), in steps whose numbers are short, so that none is rounded."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.6g}%"))


def log_limits(values: Iterable[float], share: float = 0.12) -> tuple[float, float]:
    """Limits of a logarithmic axis around positive values, with a margin that labels fit into, never below 30 %."""
    found = list(values)
    low, high = math.log(min(found)), math.log(max(found))
    margin = max(share * (high - low), 0.15)
    return math.exp(low - margin), math.exp(high + margin)


@dataclass(frozen=True)
class Mark:
    """A number that is to stand beside a point."""

    axis: Any
    point: tuple[float, float]  # in data coordinates
    text: str
    colour: str
    sides: str  # where it may stand, best first
    needed: bool  # it must stand somewhere, even upon a line


def marks_of(axis: Any, points: Sequence[tuple[int, float, float]], colour: str, sides: str) -> list[Mark]:
    """Marks of the points (n, x, y) of a line; those of its ends come first and are needed."""
    last = len(points) - 1
    marks = [
        Mark(axis, (x, y), f"n = {n:,}" if place in (0, last) else f"{n:,}", colour, sides, place in (0, last))
        for place, (n, x, y) in enumerate(points)
    ]
    return sorted(marks, key=lambda mark: not mark.needed)


def place_marks(figure: Any, marks: Iterable[Mark]) -> None:
    """Write marks beside their points, where they cover neither another mark nor a line; the first ones choose first.

    Marks that are not needed are left out where there is no such place, or where another point would be nearer.
    Everything else must be drawn before.
    """
    figure.draw_without_rendering()  # settles the layout, from which follows where things are
    taken: list[Any] = []
    inked: dict[Any, NDArray[np.float64]] = {}
    for mark in marks:
        frame = mark.axis.get_window_extent()
        ink = inked.setdefault(mark.axis, _ink(mark.axis))
        choices: list[tuple[int, int, Any]] = []
        for place, side in enumerate(mark.sides):
            text = mark.axis.annotate(
                mark.text, mark.point, **_SIDES[side], textcoords="offset points", fontsize=8, color=mark.colour
            )
            box = text.get_window_extent()
            inside = frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
            covered = _count(box, ink) + _nearer(mark, box)
            if inside and not any(box.padded(4).overlaps(other) for other in taken):
                choices.append((covered, place, text))
            else:
                text.remove()
        best = min(choices, key=lambda choice: choice[:2], default=None)
        for choice in choices:
            if choice is not best or (choice[0] and not mark.needed):
                choice[2].remove()
            else:
                taken.append(choice[2].get_window_extent())


def _count(box: Any, ink: NDArray[np.float64]) -> int:
    """How many of the points [points, 2] a box covers."""
    return int(((ink >= box.min - 1) & (ink <= box.max + 1)).all(axis=1).sum())


def _nearer(mark: Mark, box: Any) -> int:
    """How many points of the axis are nearer to a box than the point that it belongs to."""
    points = [mark.axis.transData.transform(np.column_stack(line.get_data())) for line in mark.axis.lines]
    middle = (box.min + box.max) / 2
    own = np.hypot(*(mark.axis.transData.transform(mark.point) - middle))
    return int((np.hypot(*(np.concatenate(points) - middle).T) < own - 1).sum())


def _ink(axis: Any) -> NDArray[np.float64]:
    """Pixels of an axis that its lines pass, some two apart: [pixels, 2]."""
    found = [np.empty((0, 2))]
    for line in axis.lines:
        corners = axis.transData.transform(np.column_stack(line.get_data()))
        for start, end in pairwise(corners):
            steps = int(np.hypot(*(end - start)) / 2) + 2
            found.append(start + np.linspace(0, 1, steps)[:, None] * (end - start))
    return np.concatenate(found)
