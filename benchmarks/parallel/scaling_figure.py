"""Predicted attention over many GPUs as a figure and a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

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
from hf_fastdecode.measurement.rows import markdown

from .cost_model import Cluster, Heads, Prediction

_LINES: dict[str, tuple[str, str, Callable[[Prediction], float]]] = {
    "ring": ("ring: keys and values passed round", "#d08a1d", lambda found: found.ring_s),
    "tree": ("tree: three all-reduces, as the paper", "#3b6fb6", lambda found: found.tree_s),
    "one all-gather": ("tree: one all-gather, as here", COLOURS["shared"], lambda found: found.one_gather_s),
}


def draw_scaling(found: Sequence[Prediction], heads: Heads, path: Path) -> Path:
    """Microseconds of a layer against the number of GPUs, a panel for each context."""
    panels = _by_context(found)
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure, axes = new_figure(len(panels), columns, (3.6 * columns + 0.6, 2.9 * lines + 1.1))
    for axis, (context, own) in zip(axes, panels, strict=True):
        gpus = [one.gpus for one in own]
        for label, colour, seconds in _LINES.values():
            axis.plot(gpus, [1e6 * seconds(one) for one in own], color=colour, marker="o", markersize=3, label=label)
        axis.plot(gpus, [1e6 * one.attend_s for one in own], "k--", linewidth=1, label="each GPU's part alone")
        axis.set_title(f"{context:,} tokens", fontsize=9)
        powers_of_two(axis, gpus, [f"{count:,}" for count in gpus])
        axis.tick_params(axis="x", labelrotation=45)
        axis.set_yscale("log")
        plain_numbers(axis.yaxis)
        axis.set_xlabel("GPUs", fontsize=9)
        style_axis(axis)
    axes[0].set_ylabel("microseconds a layer", fontsize=9)
    add_title(figure, f"Predicted: attention of one row's decode step, {_heads(heads)}, by a cost model")
    add_legend(figure, columns=2, fontsize=8)
    return save(figure, path)


def scaling_table(found: Sequence[Prediction], cluster: Cluster, heads: Heads) -> str:
    """The predictions as a Markdown table."""
    lines = []
    for one in found:
        cells = [
            f"{one.context:,}",
            f"{one.gpus:,}",
            _us(one.attend_s),
            *(_us(line[2](one)) for line in _LINES.values()),
        ]
        lines.append([*cells, f"{one.ring_s / one.tree_s:,.1f}x", f"{one.ring_s / one.one_gather_s:,.1f}x"])
    names = ["context", "GPUs", "its part alone", *_LINES, "ring over tree", "ring over one all-gather"]
    note = f"Predicted, not measured: microseconds of a layer and row, {_heads(heads)}, 2 bytes a number; {cluster}."
    return markdown(names, lines, note)


def _by_context(found: Sequence[Prediction]) -> list[tuple[int, list[Prediction]]]:
    return [(context, list(own)) for context, own in groupby(found, lambda one: one.context)]


def _us(seconds: float) -> str:
    number = 1e6 * seconds
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def _heads(heads: Heads) -> str:
    return f"{heads.heads} heads over {heads.kv_heads} KV heads of {heads.head_dim}"
