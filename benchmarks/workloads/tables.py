"""Measured workloads as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_fastdecode.measurement.rows import Measurement, by, markdown

from .cases import LEVELS

_SECONDS: Final = (("total_s", 1, "s"), ("prefill_s", 1, "s"), ("ms_per_step", 1, "ms"))
_GIB: Final = (2**-30, "GiB")


def samples_page(rows: Sequence[Measurement]) -> str:
    """A line for each number of samples of a prompt: seconds until all have finished, a step, and memory."""
    columns: dict[str, tuple[str, float, str]] = {
        "all samples finished": ("last_sample_s", 1, "s"),
        "first token": ("prefill_s", 1, "s"),
        "a step": ("ms_per_step_p50", 1, "ms"),
    }
    if any(row["peak_bytes"] for row in rows):  # unknown on a CPU
        columns["peak memory"] = ("peak_bytes", *_GIB)
    lines = [[n, *(_change(ways, *one) for one in columns.values())] for n, ways in _ways_by(rows, "n")]
    return markdown(["n", *columns], lines, f"{_where(rows[0])}; medians; stock → shared.")


def levels_page(rows: Sequence[Measurement]) -> str:
    """A line for each batch and level of sharing: seconds of the call and of its prefill, a step, tokens, memory."""
    lines = []
    for row in rows:
        cells = [f"{row['problems']} x {row['samples']}", LEVELS[row["way"]].words]
        if row["status"] == "ok":
            cells += [_value(row, *column) for column in _SECONDS]
            cells += [f"{int(row['prefilled_tokens']):,}", _value(row, "kv_bytes", *_GIB)]
        else:
            cells += [row["status"], "", "", "", ""]
        lines.append(cells)
    names = ["problems x samples", "shared", "a call", "prefill", "a step", "tokens prefilled", "KV cache"]
    return markdown(names, lines, f"{_where(rows[0])}, {int(rows[0]['shared_tokens']):,} of them examples.")


def questions_page(rows: Sequence[Measurement]) -> str:
    """A line for each number of questions about a text."""
    lines = []
    for questions, ways in _ways_by(rows, "questions"):
        tokens = [f"{int(row['prefilled_tokens']):,}" if row["status"] == "ok" else row["status"] for row in ways]
        cells = [questions, *(_change(ways, *column) for column in _SECONDS), " → ".join(tokens)]
        lines.append([*cells, _change(ways, "kv_bytes", *_GIB)])
    text = f"{int(rows[0]['prefix_tokens']):,} tokens of text and solved questions"
    names = ["questions", "a call", "prefill", "a step", "tokens prefilled", "KV cache"]
    return markdown(names, lines, f"{_where(rows[0], text)}; stock → shared.")


def _ways_by(rows: Sequence[Measurement], column: str) -> list[tuple[str, list[Measurement]]]:
    """Values of a column, and stock's row and ours, those that were measured."""
    return [
        (next(iter(ways.values()))[column], [ways[way] for way in ("stock", "shared") if way in ways])
        for ways in by(rows, column)
    ]


def _change(ways: Sequence[Measurement], column: str, factor: float, unit: str) -> str:
    return " → ".join(_value(row, column, factor, unit) for row in ways)


def _value(row: Measurement, column: str, factor: float, unit: str) -> str:
    if row["status"] != "ok":
        return row["status"]
    value = factor * float(row[column])
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _where(row: Measurement, context: str = "") -> str:
    context = context or f"prompts of up to {int(row['prompt_tokens']):,} tokens"
    versions = f"torch {row['torch']}, transformers {row['transformers']}"
    model = row["model"].removeprefix("shape:")
    return f"{row['device']}, {model}, {row['dtype']}, {versions}; {context}, {row['new_tokens']} new tokens"
