"""How log-probabilities of rollouts agree with a trainer's: a table, and histograms of their ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hf_fastdecode.measurement.figures import COLOURS, panel_axes
from hf_fastdecode.measurement.rows import Measurement, by, markdown

_WAYS: Final = {
    "log-probs of steps": "of steps",
    "log-probs of steps, replayed": "of steps, routing replayed",
    "log-probs of trainer": '`"trainer"`',
    "log-probs of trainer, replayed": '`"trainer"`, routing replayed',
}
_ORDERS: Final = {
    "auto, graph": "steps",
    "auto, eager": "eager steps",
    "trainer": '`"trainer"`',
    "invariant": "kernels of one order, eager",
}
_BIN: Final = "from "
"""In front of where a bin of (ratio - 1) begins, in the names of columns of counts."""
_DRAWN: Final = ("log-probs of steps", "log-probs of trainer")


def ratios_table(rows: Sequence[Measurement]) -> str:
    """A line for each model, precision and what is trained: the same bits and the largest difference, of each way."""
    rows = [row for row in rows if row["tokens"]]  # the others return no log-probabilities
    ways = [way for way in _WAYS if any(row["way"] == way for row in rows)]
    lines = []
    for of_way in by(rows, "model", "precision", "weights"):
        first = next(iter(of_way.values()))
        cells = [_agreement(of_way[way]) if way in of_way else "" for way in ways]
        lines.append([*(first[name] for name in ("model", "precision", "weights")), *cells])
    first, fewest = rows[0], min(int(row["tokens"]) for row in rows)
    note = (
        "Tokens whose log-probability has the same bits as TRL's old one, and the largest difference; in parentheses, "
    )
    note += f"if any, tokens with a ratio outside 0.9 to 1.1. At least {fewest:,} tokens each, "
    parts = f"{first['passes']} mini-batches" if int(first["passes"]) > 1 else "one mini-batch"
    counts = " or ".join(map(str, sorted({int(row["rows"]) for row in rows})))
    note += f"{counts} completions in {parts}; {first['program']} (TRL {first['trl']}); "
    note += f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}."
    return markdown(["model", "precision", "trained", *(_WAYS[way] for way in ways)], lines, note)


def orders_table(rows: Sequence[Measurement]) -> str:
    """A line for each call of a model, and in it of each way: a step, a forward pass, tokens with that pass's bits."""
    lines = []
    for of_way in by([row for row in rows if row["ms_per_step"]], "model", "prompts", "context", "samples"):
        first = next(iter(of_way.values()))
        call = f"{first['prompts']} x {int(first['context']):,} tokens, {first['samples']} samples"
        given = [of_way.get(way) for way in _ORDERS]
        cells = ["" if one is None else f"{one['ms_per_step']} ms; {one['pass_s']} s; {_share(one)}" for one in given]
        lines.append([first["model"], call, *cells])
    note = "A step; a forward pass over the finished rows; tokens whose log-probability has the bits of that pass. "
    note += f"Calls of 128 tokens, medians of 3; {rows[0]['device']}, bfloat16, torch {rows[0]['torch']}, "
    note += f"transformers {rows[0]['transformers']}."
    return markdown(["model", "call", *_ORDERS.values()], lines, note)


def _share(row: Measurement) -> str:
    return f"{100 * float(row['same_bits']):g}%"


def _agreement(row: Measurement) -> str:
    outside = float(row["outside"])
    shown = f"{float(row['same_bits']):.0%}, {float(row['largest_difference']):.0e}"
    return shown + (f" ({outside:.1%})" if outside else "")


def draw_ratios(rows: Sequence[Measurement], path: Path) -> Path:
    """Draw histograms of ratios, a line of panels for each model and precision: of steps, and of a trainer's pass.

    All weights are trained, or if no row of a model is of that, what its rows say. Where routing was replayed as well,
    a line is drawn over the bars.
    """
    whole = {row["model"] for row in rows if row["weights"] == "all"}
    drawn = [row for row in rows if row["tokens"] and (row["weights"] == "all" or row["model"] not in whole)]
    cases = by(drawn, "model", "precision")
    cases = [of_way for of_way in cases if set(_DRAWN) <= of_way.keys()]
    names = [name for name in rows[0] if name.startswith(_BIN)]
    title = f"Tokens by the ratio of a trainer's probability to the sampler's, minus 1; {rows[0]['device']}"
    with panel_axes(2 * len(cases), 2, (10.4, 1.8 * len(cases) + 0.9), path, title, legend_columns=4) as axes:
        for number, axis in enumerate(axes):
            _draw_panel(axis, cases[number // 2], _DRAWN[number % 2], names)
    return path


def _draw_panel(axis: Any, of_way: dict[str, Measurement], way: str, names: Sequence[str]) -> None:
    row, replayed = of_way[way], of_way.get(f"{way}, replayed")
    colour = COLOURS["stock" if way == _DRAWN[0] else "shared"]
    axis.bar(range(len(names)), [int(row[name]) for name in names], width=0.9, color=colour, label=way)
    if replayed is not None:
        ends = [place - 0.5 for place in range(len(names) + 1)]
        axis.stairs([int(replayed[name]) for name in names], ends, color="black", label="the same, routing replayed")
    edges = [float(name.removeprefix(_BIN)) for name in names]
    ticks = {place - 0.5: f"{edge:g}" for place, edge in enumerate(edges) if abs(edge) in (1e-6, 1e-4, 1e-2, 1)}
    ticks[edges.index(0)] = "0"
    axis.set_xticks(list(ticks), list(ticks.values()))
    for place in (place for place, edge in enumerate(edges) if abs(edge) == 0.1):
        axis.axvline(place - 0.5, color="#b3261e", linestyle="--", linewidth=0.9, label="ratio 0.9 or 1.1")
    axis.set_xlim(-1, len(names))
    axis.set_yscale("log")
    axis.set_ylim(0.5, 2 * max(int(one[name]) for one in of_way.values() for name in names))
    axis.set_ylabel("tokens", fontsize=8)
    trained = "" if row["weights"] == "all" else f", {row['weights']}"
    axis.set_title(
        f"{row['model']}, {row['precision']}{trained}: {float(row['same_bits']):.0%} have the same bits", fontsize=9
    )
