"""README's figure and table: whole calls and KV memory against n, beside stock transformers and vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from hf_fastdecode.measurement.figures import new_figure, plain_numbers, powers_of_two, save
from hf_fastdecode.measurement.rows import Measurement, markdown

from .generate.cases import PromptTree
from .generate.table import cases_of, stock_kv_bytes, stored, timed, where_measured
from .page_tables import cell
from .programs_table import beside_vllm, family_of, runs_behind

SHAPE: Final = "8b-gqa"
CONTEXT: Final = 2048
LARGEST: Final = (8192, 128)
"""The model, the context of the figure's lines, and the context and samples of its bars."""
_TABLE: Final = ((2048, 1), (2048, 16), LARGEST)
_SHOWN: Final = {"stock": "transformers", "vllm": "vLLM", "shared": "hf_fastdecode"}


class Theme(NamedTuple):
    """Colours that can be read on one background."""

    background: str
    text: str
    stock: str
    vllm: str
    ours: str


THEMES: Final = {
    "light": Theme("#ffffff", "#1f2328", "#767c84", "#b45309", "#1b7f5c"),
    "dark": Theme("#0d1117", "#e6edf3", "#9aa4ae", "#e3a04f", "#46c28e"),
}
"""Backgrounds as GitHub has them."""
SIZES: Final = {"wide": (8.3, 2.7, 3), "narrow": (3.6, 7.6, 1)}
"""Inches of the figure, 100 pixels each, and its panels in a line: on a screen, and on a phone."""
_NAMES: Final = {"stock": "transformers", "vllm": "vLLM", "vllm-cascade": "vLLM, cascade", "shared": "hf_fastdecode"}


def draw_readme_figures(rows: Sequence[Measurement], folder: Path) -> list[Path]:
    """Draw the figure for each theme and size, to ``FOLDER/generate-THEME-SIZE.png``; returns the files."""
    return [
        _draw(rows, THEMES[theme], *SIZES[size], folder / f"generate-{theme}-{size}.png")
        for theme in THEMES
        for size in SIZES
    ]


def readme_rows(rows: Sequence[Measurement]) -> list[Measurement]:
    """Those of README's table: some calls of `SHAPE`, and of each other kind of model the first that vLLM ran too.

    All are of one prompt.
    """
    own = _cases(rows)
    chosen = [own[point] for point in _TABLE if point in own]
    beside = [row for row in beside_vllm(rows) if row["way"] == "shared" and not PromptTree.of_row(row["shape"])]
    firsts = {family_of(row).partition(",")[0]: row for row in reversed(beside)}
    chosen += [ways for ways in cases_of(rows) if ways.get("shared") in firsts.values()]
    return [row for ways in chosen for way, row in ways.items() if way in _SHOWN]


def readme_table(rows: Sequence[Measurement]) -> str:
    """A line for each case of `readme_rows`: whole calls, and KV caches at the end."""
    lines = []
    for ways in cases_of(rows):
        ours = ways["shared"]
        behind = runs_behind(ways.get("vllm"), ours)
        calls = [cell(ways.get(way), lambda row: f"{float(row['total_s']):.2f} s") for way in _SHOWN]
        calls[-1] = f"**{calls[-1]}**" if behind else calls[-1]
        model, _, _ = ours["shape"].partition(" ")
        lines.append(
            [model, f"{int(ours['context']):,} tokens", ours["samples"], *calls, stored(ways.get("stock"), ours)]
        )
    names = ["model", "prompt", "n", *_SHOWN.values(), "KV cache"]
    ours, theirs = (next(row for row in rows if row["way"] == way) for way in ("shared", "vllm"))
    legend = "KV cache: transformers, computed where it ran out of memory → hf_fastdecode; empty: not measured"
    new = " or ".join(sorted({row["new_tokens"] for row in rows}))
    where = f"{where_measured([ours])}, {theirs['ran'].partition(',')[0]}, {new} new tokens"
    return markdown(names, lines, f"{where}; whole calls, {timed(rows)}; {legend}; bold: behind vLLM.")


def _cases(rows: Sequence[Measurement]) -> dict[tuple[int, int], dict[str, Measurement]]:
    found = cases_of([row for row in rows if row["shape"] == SHAPE])
    return {(int(ways["shared"]["context"]), int(ways["shared"]["samples"])): ways for ways in found}


def _draw(rows: Sequence[Measurement], theme: Theme, width: float, height: float, columns: int, path: Path) -> Path:
    figure, (seconds, memory, bars) = new_figure(3, columns, (width, height))
    figure.set_facecolor(theme.background)
    cases = _cases(rows)
    lines = {samples: cases[context, samples] for context, samples in sorted(cases) if context == CONTEXT}
    for way, colour in (("stock", theme.stock), ("shared", theme.ours)):
        times = {n: float(ways[way]["total_s"]) for n, ways in lines.items()}
        stored = {n: stock_kv_bytes(ways[way], ways["shared"]) / 2**30 for n, ways in lines.items()}
        _line(seconds, times, way, colour)
        _line(memory, stored, way, colour)
    for axis, title in ((seconds, "Whole call, seconds"), (memory, "KV cache, GiB")):
        _style(axis, title, theme)
        powers_of_two(axis, list(lines), [str(n) for n in lines])
        axis.set_yscale("log")
        axis.margins(x=0.16, y=0.2)
        axis.set_ylim(bottom=axis.get_ylim()[0] / 2.5)  # for the lower line's name
        plain_numbers(axis.yaxis)
        axis.set_xlabel(f"n samples of a {CONTEXT:,}-token prompt", color=theme.text, fontsize=10)
        axis.grid(axis="y", alpha=0.25, linewidth=0.6)
    _bars(bars, cases[LARGEST], theme)
    first = next(iter(lines.values()))["shared"]
    note = f"Llama-3.1-8B's shape, {first['new_tokens']} new tokens, {first['dtype']}, {first['device']}"
    figure.supxlabel(note, color=theme.text, fontsize=9 if columns > 1 else 8)
    return save(figure, path, dpi=160)


def _line(axis: Any, points: dict[int, float], way: str, colour: str) -> None:
    """A line over n with the values of its points: above them for stock, below for ours."""
    axis.plot(list(points), list(points.values()), color=colour, marker="o", markersize=5, linewidth=2.2)
    first, middle, last = points
    named, side, vertical = (last, 7, "bottom") if way == "stock" else (middle, -7, "top")
    for n, value in points.items():
        if way == "stock" and n == first and value < 1:
            continue  # one sample's bytes are those of ours, whose label is there
        text = f"{value:.2g}" if value < 9.95 else f"{value:.0f}"
        if n == named:
            text = f"{_NAMES[way]}: {text}" if way == "stock" else f"{text}\n{_NAMES[way]}"
        across = "right" if n == last else "center"
        place = {"textcoords": "offset points", "ha": across, "va": vertical}
        axis.annotate(text, (n, value), (12 * (n == last), side), **place, color=colour, fontsize=10, weight="bold")


def _bars(axis: Any, ways: dict[str, Measurement], theme: Theme) -> None:
    """Seconds of the largest call in each way, named above its bar."""
    colours = {"stock": theme.stock, "shared": theme.ours}
    for at, (way, name) in enumerate(_NAMES.items()):
        row, colour = ways[way], colours.get(way, theme.vllm)
        fits = row["status"] == "ok"
        seconds = float(row["total_s"]) if fits else 0.0
        axis.barh(at, seconds, height=0.34, color=colour)
        shown = f"{name}: {seconds:.2f} s" if fits else f"{name}: {row['status']}"
        axis.text(0.02, at - 0.24, shown, color=colour, fontsize=10, fontweight="bold", va="bottom")
    context, samples = LARGEST
    _style(axis, "Whole call beside vLLM", theme)
    axis.invert_yaxis()
    axis.set_yticks([])
    axis.set_ylim(3.4, -0.75)
    axis.set_xlabel(f"s; n = {samples}, {context:,}-token prompt", color=theme.text, fontsize=10)


def _style(axis: Any, title: str, theme: Theme) -> None:
    axis.set_title(title, color=theme.text, fontsize=11, fontweight="bold", loc="left")
    axis.set_facecolor(theme.background)
    axis.tick_params(labelsize=10, colors=theme.text)
    axis.spines[["top", "right"]].set_visible(False)
    axis.spines[["left", "bottom"]].set_color(theme.text)
