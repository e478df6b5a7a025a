"""Axes of pictures: plain numbers on logarithmic scales, numbers beside points, units of time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any


def unit_of(seconds: Iterable[float]) -> tuple[float, str]:
    """The factor and the name of the unit in which times read best."""
    return (1.0, "s") if max(seconds, default=0.0) >= 10 else (1e3, "ms")


def plain_numbers(axis: Any) -> None:
    """Plain numbers on a logarithmic axis (such as ``axes.xaxis``), also where it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    span = high / low
    if span < 3:
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if span < 300 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def log_limits(values: Iterable[float], share: float = 0.12) -> tuple[float, float]:
    """Limits of a logarithmic axis around positive values, with a margin that labels fit into, never below 30 %."""
    found = list(values)
    low, high = math.log(min(found)), math.log(max(found))
    margin = max(share * (high - low), 0.15)
    return math.exp(low - margin), math.exp(high + margin)


def mark_samples(axis: Any, points: Sequence[tuple[int, float, float]], colour: str, side: str) -> list[Any]:
    """Write n beside each point (n, x, y), on its left or right; the ends come first in the list of texts."""
    order = sorted(range(len(points)), key=lambda place: (0 < place < len(points) - 1, place))
    sign, horizontal, vertical = (-1, "right", "bottom") if side == "left" else (1, "left", "top")
    texts = []
    for place in order:
        n, x, y = points[place]
        texts.append(
            axis.annotate(
                f"n = {n:,}" if place in (0, len(points) - 1) else f"{n:,}",
                (x, y),
                xytext=(4 * sign, -2 * sign),
                textcoords="offset points",
                ha=horizontal,
                va=vertical,
                fontsize=8,
                color=colour,
            )
        )
    return texts


def hide_overlaps(figure: Any, texts: Sequence[Any]) -> None:
    """Remove the texts that would cover an earlier one of the list, once the layout is settled."""
    figure.draw_without_rendering()
    kept: list[Any] = []
    for text in texts:
        box = text.get_window_extent()
        if any(box.overlaps(other) for other in kept):
            text.remove()
        else:
            kept.append(box)
