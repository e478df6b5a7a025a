"""Measured workloads as Markdown tables: as the commands show them, and as documentation pages do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_fastdecode.measurement.rows import Measurement, markdown

# As the commands show them

_TIMES: Final = ("prefill s", "decode s", "ms/step", "tokens prefilled", "KV MiB")


def levels_table(rows: Sequence[Measurement]) -> str:
    """A line for each level of each point; beside it, what no sharing takes over its time."""
    lines = [
        [row["problems"], row["samples"], row["way"], *_times(row), _ratio(row, rows, ("problems", "samples"), "none")]
        for row in rows
    ]
    return markdown(["problems", "samples", "sharing", *_TIMES, "none / this"], lines).rstrip("\n")


def questions_table(rows: Sequence[Measurement]) -> str:
    """A line for each way of each number of questions; beside it, what stock takes over its time."""
    lines = [
        [row["questions"], row["way"], *_times(row), _ratio(row, rows, ("questions",), "stock"), _right(row)]
        for row in rows
    ]
    return markdown(["questions", "way", *_TIMES, "stock / this", "right"], lines).rstrip("\n")


def _times(row: Measurement) -> list[str]:
    if row["status"] != "ok":
        return ["-"] * len(_TIMES)
    times = [f"{float(row[name]):.3g}" for name in ("prefill_s", "decode_s", "ms_per_step")]
    return [*times, f"{int(row['prefilled_tokens']):,}", f"{int(row['kv_bytes']) / 2**20:,.1f}"]


def _right(row: Measurement) -> str:
    return f"{row['correct']} of {row['questions']}" if row.get("correct") else "-"


def _ratio(row: Measurement, rows: Sequence[Measurement], same: Sequence[str], base: str) -> str:
    """The seconds of a call of the way `base` at the same point over this one's."""
    of = [one for one in rows if one["way"] == base and all(one[name] == row[name] for name in same)]
    if not of or row["status"] != "ok" or of[0]["status"] != "ok":
        return "-"
    return f"{float(of[0]['total_s']) / float(row['total_s']):.2f}x"


# As documentation pages show them

_LEVELS: Final = {
    "none": "nothing (stock)",
    "few-shot": "the examples",
    "problem": "each problem's prompt",
    "two-level": "examples, then problems",
}
_SECONDS: Final = (("total_s", 1, "s"), ("prefill_s", 1, "s"), ("ms_per_step", 1, "ms"))
_GIB: Final = (2**-30, "GiB")


def samples_page(rows: Sequence[Measurement]) -> str:
    """A line for each number of samples of a prompt: seconds until all have finished, a step, and memory."""
    memory = any(row["peak_bytes"] for row in rows)  # unknown on a CPU
    lines = []
    for stock, shared in _pairs(rows, "n"):
        cells = [shared["n"], _change(stock, shared, "last_sample_s", 1, "s")]
        cells += [_change(stock, shared, "prefill_s", 1, "s"), _change(stock, shared, "ms_per_step_p50", 1, "ms")]
        if memory:
            cells.append(_change(stock, shared, "peak_bytes", *_GIB))
        lines.append(cells)
    names = ["n", "all samples finished", "first token", "a step"]
    return markdown(
        [*names, *(["peak memory"] if memory else [])], lines, f"{_where(rows[0])}; medians; stock → shared."
    )


def levels_page(rows: Sequence[Measurement]) -> str:
    """A line for each batch and level of sharing: seconds of the call and of its prefill, a step, tokens, memory."""
    lines = []
    for row in rows:
        cells = [f"{row['problems']} x {row['samples']}", _LEVELS[row["way"]]]
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
    for stock, shared in _pairs(rows, "questions"):
        tokens = [
            f"{int(row['prefilled_tokens']):,}" if row["status"] == "ok" else row["status"] for row in (stock, shared)
        ]
        cells = [shared["questions"], *(_change(stock, shared, *column) for column in _SECONDS)]
        lines.append([*cells, " → ".join(tokens), _change(stock, shared, "kv_bytes", *_GIB)])
    text = f"{int(rows[0]['prefix_tokens']):,} tokens of text and solved questions"
    names = ["questions", "a call", "prefill", "a step", "tokens prefilled", "KV cache"]
    return markdown(names, lines, f"{_where(rows[0], text)}; stock → shared.")


def _pairs(rows: Sequence[Measurement], column: str) -> list[tuple[Measurement, Measurement]]:
    ways = {(row[column], row["way"]): row for row in rows}
    values = dict.fromkeys(row[column] for row in rows)
    return [(ways[value, "stock"], ways[value, "shared"]) for value in values]


def _change(stock: Measurement, shared: Measurement, column: str, factor: float, unit: str) -> str:
    return f"{_value(stock, column, factor, unit)} → {_value(shared, column, factor, unit)}"


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
