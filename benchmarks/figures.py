"""Figures of operators and of workloads, which are Hydragen's figures 6 and 7."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
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

from .ops.table import is_part, one_node
from .workloads.cases import LEVELS, WAYS

STYLES: dict[str, tuple[str, str]] = {
    "ours": (COLOURS["shared"], "hf_fastdecode"),
    "recipe": ("#3b6fb6", "recipe: best library call, flash, merge"),
    "sketch": ("#c46a8d", "sketch: two Triton launches"),
    "plain": (COLOURS["stock"], "plain flash decode, a copy a row"),
}
"""The colour and name of each way."""
_COLUMNS = 4

Picture = Callable[[Sequence[Measurement], Path], Path | None]
"""Draws rows to a file, or finds nothing to draw."""


def plot(rows: Sequence[Measurement], stem: Path) -> list[Path]:
    """Draw all figures of measured operators, to ``STEM-NAME.png``; returns the files: none without a line to draw."""
    found = [picture(rows, stem.with_name(f"{stem.name}-{name}.png")) for name, picture in _OPS.items()]
    return [path for path in found if path is not None]


def _op_lines(x: str, other: str) -> Picture:
    """Latency of operators against `x`: a line of panels for each head layout, a panel for each value of `other`."""

    def draw(rows: Sequence[Measurement], path: Path) -> Path | None:
        rows = [row for row in rows if one_node(row) and not is_part(row["way"]) and row["status"] == "ok"]
        shortest = min((int(row["suffix"]) for row in rows), default=0)
        panels = _panels([row for row in rows if int(row["suffix"]) == shortest], x, other)
        if not panels:
            return None
        figure, axes = _figure(panels)
        for axis, (panel, shown) in zip(axes, panels.items()):
            for way in sorted({row["way"] for row in shown}, key=[*STYLES, *(row["way"] for row in shown)].index):
                points = sorted((int(row[x]), float(row["us_p50"])) for row in shown if row["way"] == way)
                colour, name = STYLES.get(way, ("#444444", way))
                axis.plot(*zip(*points), color=colour, label=name, marker="o", markersize=3.5, linewidth=1.6)
            floors = sorted({(int(row[x]), float(row["floor_us"])) for row in shown})
            axis.plot(*zip(*floors), "k--", linewidth=1, label="floor: bytes or arithmetic")
            ticks = sorted({int(value) for line in axis.lines for value in line.get_xdata()})
            powers_of_two(axis, ticks, [_tokens(tick) for tick in ticks])
            axis.set_title(panel, fontsize=9)
            axis.set_yscale("log")
            axis.minorticks_off()
            axis.set_xlabel("context, tokens" if x == "context" else "n, samples", fontsize=8)
            axis.set_ylabel("microseconds a layer", fontsize=8)
            style_axis(axis)
            plain_numbers(axis.yaxis)
        title = f"Attention of one decode step over a shared context, {shortest} own tokens a row, {_where(rows)}"
        return _saved(figure, title, path)

    return draw


def _floor_share(rows: Sequence[Measurement], path: Path) -> Path | None:
    """A map for each head layout: the floor over our time, by context and n."""
    rows = [row for row in rows if row["way"] == "ours" and row["status"] == "ok" and one_node(row)]
    panels: dict[Any, list[Measurement]] = {}
    for row in rows:
        panels.setdefault((row["heads"], row["kv_heads"], row["suffix"]), []).append(row)
    panels = {key: own for key, own in panels.items() if len(own) > 1}
    if not panels:
        return None
    figure, axes = _figure(panels)
    for axis, ((heads, kv_heads, suffix), own) in zip(axes, panels.items()):
        contexts, samples = (sorted({int(row[name]) for row in own}) for name in ("context", "rows"))
        shares = [[float("nan")] * len(contexts) for _ in samples]
        for row in own:
            n, context = samples.index(int(row["rows"])), contexts.index(int(row["context"]))
            shares[n][context] = share = 1 / float(row["over_floor"])
            colour = "black" if share > 0.7 else "white"
            axis.text(context, n, f"{share:.0%}", ha="center", va="center", fontsize=8, color=colour)
        axis.imshow(shares, vmin=0, vmax=1, cmap="viridis", aspect="auto", origin="lower", alpha=0.85)
        axis.set_xticks(range(len(contexts)), [_tokens(context) for context in contexts])
        axis.set_yticks(range(len(samples)), [str(n) for n in samples])
        axis.set_xlabel("context, tokens")
        axis.set_ylabel("n, samples")
        axis.set_title(f"{heads} heads, {kv_heads} KV; {suffix} own tokens a row", fontsize=9)
    title = "hf_fastdecode: floor over time (100 %: the bandwidth of a copy, the rate of a product)"
    add_title(figure, f"{title}, {_where(rows)}")
    return save(figure, path)


_OPS: dict[str, Picture] = {
    "latency-context": _op_lines("context", "rows"),
    "latency-n": _op_lines("rows", "context"),
    "floor": _floor_share,
}


def _panels(rows: Sequence[Measurement], x: str, other: str) -> dict[str, list[Measurement]]:
    """Rows by panel: up to four values of `other` for each head layout, where x takes two values at least."""
    found: dict[str, dict[int, list[Measurement]]] = {}
    for row in rows:
        layout = f"{row['heads']} heads, {row['kv_heads']} KV"
        found.setdefault(layout, {}).setdefault(int(row[other]), []).append(row)
    panels = {}
    for name, by_value in found.items():
        values = sorted(value for value, own in by_value.items() if len({row[x] for row in own}) > 1)
        last, most = len(values) - 1, min(_COLUMNS, len(values))
        for value in [values[round(index * last / max(1, most - 1))] for index in range(most)]:
            panels[f"{name}; {'context' if other == 'context' else 'n'} {value:,}"] = by_value[value]
    return panels


def _figure(panels: Sized) -> tuple[Any, list[Any]]:
    count = len(panels)
    columns = 3 if count % 3 == 0 and count % _COLUMNS else min(_COLUMNS, count)
    lines = -(-count // columns)
    return new_figure(count, columns, (max(5.5, 3.6 * columns), 3.1 * lines + 0.8))


def _saved(figure: Any, title: str, path: Path, *, columns: int = 3, size: int = 8) -> Path:
    add_title(figure, title)
    add_legend(figure, columns=columns, fontsize=size)
    return save(figure, path)


def _tokens(count: int) -> str:
    return f"{count // 1024}K" if count >= 1024 and count % 1024 == 0 else str(count)


def _where(rows: Sequence[Measurement]) -> str:
    return f"{rows[0]['device']}, {rows[0]['dtype']}"


_LEVEL_COLOURS: Final = {
    **{"none": COLOURS["stock"], "few-shot": "#8a5fb5", "problem": "#3b6fb6", "two-level": COLOURS["shared"]},
    **{"stock": COLOURS["stock"], "shared": COLOURS["shared"]},
}
_UNITS: Final = (("GiB", 2**30), ("MiB", 2**20))


def draw_levels(rows: Sequence[Measurement], path: Path) -> Path:
    """Draw bars of seconds, prefill below decode, and of keys and values, for each point and level."""
    points = list(dict.fromkeys((int(row["problems"]), int(row["samples"])) for row in rows))
    levels = [level for level in LEVELS if any(row["way"] == level for row in rows)]
    figure, (time, memory) = new_figure(2, 2, (10.4, 4.4))
    unit, bytes_of_it = _unit(rows)
    width = 0.8 / len(levels)
    for row in rows:
        colour, label = _LEVEL_COLOURS[row["way"]], f"shared: {LEVELS[row['way']].words}"
        place = points.index((int(row["problems"]), int(row["samples"])))
        x = place + (levels.index(row["way"]) - (len(levels) - 1) / 2) * width
        if row["status"] != "ok":
            status = row["status"].partition(":")[0]
            for axis in (time, memory):
                axis.text(x, 0, f" {status}", rotation=90, ha="center", va="bottom", fontsize=8)
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
        f"{rows[0]['prompt_tokens']} shared by all rows; {rows[0]['new_tokens']} new tokens; {_model_and_place(rows)}"
    )
    return _finish_workload(figure, title, path)


def draw_questions(rows: Sequence[Measurement], path: Path) -> Path:
    """Draw seconds against the number of questions: of the whole call, and without prefill as in the paper."""
    figure, axes = new_figure(2, 2, (10.4, 4.4))
    for axis, column in zip(axes, ("total_s", "decode_s"), strict=True):
        for way, label in WAYS.items():
            own = sorted((row for row in rows if row["way"] == way), key=lambda row: int(row["questions"]))
            shown = [row for row in own if row["status"] == "ok" and float(row[column]) > 0]
            lost = [int(row["questions"]) for row in own if row["status"].startswith("out of memory")]
            look = {"color": _LEVEL_COLOURS[way], "label": label, "marker": "o", "markersize": 4, "linewidth": 1.8}
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
        f"{_model_and_place(rows)}"
    )
    return _finish_workload(figure, title, path)


def _finish_workload(figure: Any, title: str, path: Path) -> Path:
    for axis in figure.axes:
        style_axis(axis)
        axis.set_axisbelow(True)
    return _saved(figure, title, path, columns=4, size=9)


def _unit(rows: Sequence[Measurement]) -> tuple[str, int]:
    most = max((int(row["kv_bytes"]) for row in rows if row["status"] == "ok"), default=0)
    return next((unit for unit in _UNITS if most >= unit[1]), _UNITS[-1])


def _model_and_place(rows: Sequence[Measurement]) -> str:
    return f"{rows[0]['model']} in {rows[0]['dtype']} on {rows[0]['device']}"
