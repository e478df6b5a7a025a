"""What the README and the page of results show of the committed rows: tables between markers, and pictures.

``python -m hf_fastdecode.bench.summary`` rewrites them all; a test fails when a table does not match its rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import typer

from ..files import read_rows
from ..measurement.rows import Row
from . import RESULTS
from .clients_table import evaluation_table, programs_table, rollouts_table, training_table
from .completions_table import completions_table, steps_and_memory_table
from .generate_cases import GenerateCase, PromptTree
from .markdown import (
    cases_of,
    cell,
    finish_table,
    first_calls_table,
    generate_table,
    generate_where,
    head,
    line,
    ops_digest,
    ops_table,
)
from .plots import STYLES, plot
from .profile_tables import fixed_parts_table, steps_apart_table
from .sampling_table import sampling_table
from .slim_table import slim_table
from .vllm_table import vllm_table
from .workload_tables import levels_table, questions_table, samples_table

PICTURE = RESULTS / "generate.png"
_ROOT = RESULTS.parents[2]
PAGES = (_ROOT / "README.md", RESULTS / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
"""Of a clone; an installed package has none."""

_MARKER = re.compile(r"(<!-- rows: (?P<file>[\w.-]+)(?:, (?P<view>[\w ]+))? -->\n).*?(<!-- end rows -->)", re.DOTALL)

_MOST_LINES = 16  # of operators; more are summed up

# The way that stands for this package where only one is shown: the default, else the fastest mode measured.
_OURS = ("shared", "compile", "graph", "eager")


def table(rows: list[Row]) -> str:
    """A Markdown table of rows, of the command that measured them."""
    if "vocabulary" in rows[0]:
        return sampling_table(rows)
    if "to_token" in rows[0]:
        return completions_table(rows)
    if "bandwidth_share" in rows[0]:
        return slim_table(rows)
    if "case" in rows[0]:
        return ops_table(rows) if len({row["case"] for row in rows}) <= _MOST_LINES else ops_digest(rows)
    if {"stock", "shared"} <= {row["way"] for row in rows} <= {"stock", "shared", "compile"}:
        return stock_beside_shared(rows)
    return generate_table(rows) + (f"\n{finished}" if (finished := finish_table(rows)) else "")


def stock_beside_shared(rows: list[Row]) -> str:
    """One line for each case of `generate`, stock → ours, and a step of ours compiled where that was measured."""
    compiled = any(row["way"] == "compile" for row in rows)
    steps = ["a step", "compiled"] if compiled else ["a step"]
    lines = head(["model", "context", "n", "time to first token", *steps, "whole call", "speed-up", "KV cache"])
    for stock, shared, ways in paired(rows):
        step = [_change(stock, shared, "ms_per_step", lambda value: f"{value:.1f} ms")]
        if compiled:
            step.append(cell(ways.get("compile"), lambda row: f"{float(row['ms_per_step']):.1f} ms"))
        cells = [
            stock["shape"],
            f"{int(stock['context']):,}",
            stock["samples"],
            _change(stock, shared, "prefill_s", lambda value: f"{value:.2f} s"),
            *step,
            _change(stock, shared, "total_s", lambda value: f"{value:.2f} s"),
            f"{float(stock['total_s']) / float(shared['total_s']):.1f}x" if stock["status"] == "ok" else "",
            f"{_stock_kv(stock, shared) / 2**30:.2f} → {float(shared['kv_bytes']) / 2**30:.2f} GiB",
        ]
        lines.append(line(cells))
    ours = "stock → `enable(model)`" + ('; compiled: `enable(model, mode="compile")`' if compiled else "")
    return "\n".join(lines) + f"\n\n{generate_where(rows)}, {rows[0]['new_tokens']} new tokens; {ours}; medians.\n"


def trees_table(rows: list[Row]) -> str:
    """One line for each tree of prompts: a step of it, and its KV cache beside stock's, which has no nodes."""
    lines = head(["model", "rows", "way", "a step", "KV cache", "stock's KV cache"])
    for row in rows:
        step = f"{float(row['ms_per_step']):.1f} ms"
        stock = _stock_kv({**row, "status": "computed"}, row)
        sizes = [f"{size / 2**30:.1f} GiB" for size in (float(row["kv_bytes"]), stock)]
        lines.append(line([row["shape"], row["samples"], row["way"], step, *sizes]))
    return "\n".join(lines) + "\n"


def beams_table(rows: list[Row]) -> str:
    """One line for each beam search, stock → under it a shared-context cache."""
    lines = head(
        ["model", "context", "beams", "time to first token", "a step", "whole call", "memory over the weights"]
    )
    for ways in cases_of(rows):
        stock, ours = ways["stock-beams"], ways["beams"]

        def arrow(column: str, unit: str, scale: float = 1.0, stock: Row = stock, ours: Row = ours) -> str:
            return " → ".join(f"{scale * float(row[column]):.2f} {unit}" for row in (stock, ours))

        times = [arrow("prefill_s", "s"), arrow("ms_per_step", "ms"), arrow("total_s", "s")]
        memory = arrow("peak_bytes", "GiB", 2**-30)
        lines.append(line([ours["shape"], f"{int(ours['context']):,}", ours["samples"], *times, memory]))
    return "\n".join(lines) + f"\n\n{generate_where(rows)}, {rows[0]['new_tokens']} new tokens; medians.\n"


_VIEWS: dict[str | None, Callable[[list[Row]], str]] = {
    None: table,
    "first calls": first_calls_table,
    "trees": trees_table,
    "beams": beams_table,
    "steps and memory": steps_and_memory_table,
    "fixed parts": fixed_parts_table,
    "steps apart": steps_apart_table,
    "training": training_table,
    "evaluation": evaluation_table,
    "programs": programs_table,
    "rollouts": rollouts_table,
    "vllm": vllm_table,
    "samples": samples_table,
    "levels": levels_table,
    "questions": questions_table,
}
"""What a marker can ask for behind the file's name."""


def paired(rows: list[Row]) -> list[tuple[Row, Row, dict[str, Row]]]:
    """The stock row of each case, ours, and all by way, in the order of the rows; cases without both are left out."""
    found = []
    for ways in cases_of(rows):
        ours = next((ways[way] for way in _OURS if way in ways and ways[way]["status"] == "ok"), None)
        if ours is not None and "stock" in ways:
            found.append((ways["stock"], ours, ways))
    return found


def _change(stock: Row, shared: Row, column: str, shown: Callable[[float], str]) -> str:
    before = "out of memory" if stock["status"] != "ok" else shown(float(stock[column]))
    return f"{before} → {shown(float(shared[column]))}"


def _stock_kv(stock: Row, shared: Row) -> float:
    """Bytes of a stock cache at the end: measured, or where it did not fit, what its tokens would take.

    Every row is as long as the longest one, whose last token is drawn and not stored.
    """
    if stock["status"] == "ok":
        return float(stock["kv_bytes"])
    context, samples, new = (int(stock[name]) for name in ("context", "samples", "new_tokens"))
    tree = PromptTree.of_row(stock["shape"])
    drawn = sum(GenerateCase(stock["shape"], context, samples, new, finish=stock.get("finish", "")).lengths())
    per_token = float(shared["floor_kv_bytes"]) / ((tree.tokens if tree else context) + drawn)
    return samples * (context + new - 1) * per_token


def draw(rows: list[Row], path: Path) -> None:
    """Draw KV memory and the time of the whole call, stock beside shared, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.patches import Patch

    pairs = paired(rows)
    labels = [f"{stock['shape']}\n{int(stock['context']) // 1024}K, n={stock['samples']}" for stock, *_ in pairs]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.2), layout="constrained")
    width, grey, green = 0.38, STYLES["stock"][0], STYLES["shared"][0]
    for index, (stock, shared, _) in enumerate(pairs):
        fits = stock["status"] == "ok"
        before = _stock_kv(stock, shared) / 2**30
        after = float(shared["kv_bytes"]) / 2**30
        left.bar(index - width / 2, before, width, color=grey, hatch=None if fits else "///", edgecolor="white")
        left.bar(index + width / 2, after, width, color=green)
        left.text(index, max(before, after) * 1.08, f"{before / after:.0f}x", ha="center", fontsize=9)
        if fits:
            before_s, after_s = float(stock["total_s"]), float(shared["total_s"])
            right.bar(index - width / 2, before_s, width, color=grey)
            right.text(index, before_s * 1.05, f"{before_s / after_s:.1f}x", ha="center", fontsize=9)
        else:
            right.text(index - width / 2, 0.5, "out of memory", rotation=90, ha="center", va="bottom", fontsize=8)
        right.bar(index + width / 2, float(shared["total_s"]), width, color=green)
    left.set_yscale("log")
    left.set_title("KV cache, GiB (hatched: did not fit)")
    right.set_title(f"generate, {rows[0]['new_tokens']} new tokens, seconds")
    for axes in (left, right):
        axes.set_xticks(range(len(labels)), labels, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    left.margins(y=0.15)
    right.margins(y=0.12)
    handles = [Patch(color=grey, label="stock transformers"), Patch(color=green, label="hf_fastdecode")]
    right.legend(handles=handles, frameon=False, loc="upper left")
    figure.suptitle(f"{rows[0]['device']}, {rows[0]['dtype']}, random weights", fontsize=10, color="#555")
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def refreshed(text: str) -> str:
    """The text with every table between markers made anew from its CSV file."""

    def made(match: re.Match[str]) -> str:
        rows = read_rows(RESULTS / match["file"])
        return match[1] + _VIEWS[match["view"]](rows) + match[4]

    return _MARKER.sub(made, text)


def main() -> None:
    """Rewrite the tables and the pictures from the committed rows."""
    draw(read_rows(RESULTS / "generate.csv"), PICTURE)
    plot(read_rows(RESULTS / "ops.csv"), RESULTS / "ops")
    for page in PAGES:
        page.write_text(refreshed(page.read_text()))


if __name__ == "__main__":
    typer.run(main)
