"""Axes, colours and files that all figures of measurements share. matplotlib is imported when a figure is begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill
from typing import Any

from ..files import write_whole

COLOURS = {"stock": "#9aa0a6", "stock-static": "#5f6368", "shared": "#1b7f5c", "eager": "#8fc7ae", "graph": "#3fa37a"}
"""The colours of ways that several figures show."""


def new_figure(count: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure for files, without a window, of `size` inches, and the axes of its panels, in lines of `columns`."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, grid = plt.subplots(-(-count // columns), columns, figsize=size, layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for axis in axes[count:]:
        axis.set_visible(False)
    return figure, axes[:count]


@contextmanager
def panel_axes(
    count: int,
    columns: int,
    size: tuple[float, float],
    path: Path,
    title: str,
    *,
    letters_per_inch: int = 12,
    legend_columns: int = 3,
    finish: Callable[[Any], object] = lambda figure: None,
) -> Iterator[list[Any]]:
    """Axes to draw into; then they get style, title and legend, `finish` gets the figure, and it is saved."""
    figure, axes = new_figure(count, columns, size)
    yield axes
    for axis in axes:
        style_axis(axis)
    add_title(figure, title, letters_per_inch=letters_per_inch)
    add_legend(figure, columns=legend_columns)
    finish(figure)
    save(figure, path)


def style_axis(axis: Any) -> None:
    """Small tick labels, a faint grid, and no frame above and on the right."""
    axis.tick_params(labelsize=8)
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)


def powers_of_two(axis: Any, ticks: Sequence[int], labels: Sequence[str]) -> None:
    """A logarithmic x axis with these ticks and no others."""
    axis.set_xscale("log", base=2)
    axis.set_xticks(ticks, labels)
    axis.minorticks_off()


def plain_numbers(axis: Any) -> None:
    """Plain numbers on a logarithmic axis (such as ``axes.xaxis``), also where it spans less than a decade."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    low, high = axis.get_view_interval()
    span = high / low
    if span < 3:
        axis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    else:
        axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5) if span < 1000 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_formatter(NullFormatter())


def add_title(figure: Any, text: str, *, letters_per_inch: int = 12) -> None:
    """A title above all panels, broken into lines of the figure's width."""
    figure.suptitle(fill(text, int(letters_per_inch * figure.get_figwidth())), fontsize=10, parse_math=False)


def add_legend(figure: Any, *, columns: int = 3, fontsize: int = 9) -> None:
    """One legend below all panels, of everything that has a label, each label once."""
    handles: dict[str, Any] = {}
    for axis in figure.axes:
        handles |= {label: handle for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    location = {"loc": "outside lower center", "ncols": columns, "fontsize": fontsize, "frameon": False}
    figure.legend(handles.values(), handles.keys(), **location)


def save(figure: Any, path: Path, *, dpi: int = 120) -> Path:
    """Write a PNG file under a temporary name and rename it, and close the figure; its folder is made if need be."""
    import matplotlib.pyplot as plt

    try:
        return write_whole(
            path, lambda partial: figure.savefig(partial, format="png", dpi=dpi, metadata={"Software": None})
        )
    finally:
        plt.close(figure)
