"""Tables of the evaluations' workloads: samples of a prompt, levels of sharing, questions about a long text."""

from __future__ import annotations

from ..measurement.rows import Row
from .markdown import head, line


def samples_table(rows: list[Row]) -> str:
    """A line for each number of samples of a prompt: seconds until all have finished, a step, and memory."""
    compiled = {row["n"]: row for row in rows if row["way"] == "shared:compile"}
    more = ["all finished, compiled"] if compiled else []
    memory = ["peak memory"] if any(row["peak_bytes"] for row in rows) else []  # unknown on a CPU
    lines = head(["n", "all samples finished", *more, "first token", "a step", *memory])
    for stock, shared in _pairs(rows, "n"):
        lines.append(
            line(
                [
                    shared["n"],
                    _change(stock, shared, "last_sample_s", 1, "s"),
                    *([_value(compiled[shared["n"]], "last_sample_s", 1, "s")] if compiled else []),
                    _change(stock, shared, "prefill_s", 1, "s"),
                    _change(stock, shared, "ms_per_step_p50", 1, "ms"),
                    *([_change(stock, shared, "peak_bytes", 2**-30, "GiB")] if memory else []),
                ]
            )
        )
    return "\n".join(lines) + f"\n\n{_where(rows[0])}; medians; stock → shared.\n"


def levels_table(rows: list[Row]) -> str:
    """A line for each batch and level of sharing: seconds of the call and of its prefill, a step, tokens, memory."""
    lines = head(["problems x samples", "shared", "a call", "prefill", "a step", "tokens prefilled", "KV cache"])
    for row in rows:
        batch = f"{row['problems']} x {row['samples']}"
        if row["status"] != "ok":
            lines.append(line([batch, _LEVELS[row["way"]], row["status"], "", "", "", ""]))
            continue
        cells = [_value(row, "total_s", 1, "s"), _value(row, "prefill_s", 1, "s"), _value(row, "ms_per_step", 1, "ms")]
        tokens = f"{int(row['prefilled_tokens']):,}"
        lines.append(line([batch, _LEVELS[row["way"]], *cells, tokens, _value(row, "kv_bytes", 2**-30, "GiB")]))
    return "\n".join(lines) + f"\n\n{_where(rows[0])}, {int(rows[0]['shared_tokens']):,} of them examples.\n"


def questions_table(rows: list[Row]) -> str:
    """A line for each number of questions about a text."""
    lines = head(["questions", "a call", "prefill", "a step", "tokens prefilled", "KV cache"])
    for stock, shared in _pairs(rows, "questions"):
        tokens = [
            f"{int(row['prefilled_tokens']):,}" if row["status"] == "ok" else row["status"] for row in (stock, shared)
        ]
        lines.append(
            line(
                [
                    shared["questions"],
                    _change(stock, shared, "total_s", 1, "s"),
                    _change(stock, shared, "prefill_s", 1, "s"),
                    _change(stock, shared, "ms_per_step", 1, "ms"),
                    " → ".join(tokens),
                    _change(stock, shared, "kv_bytes", 2**-30, "GiB"),
                ]
            )
        )
    text = f"{int(rows[0]['prefix_tokens']):,} tokens of text and solved questions"
    return "\n".join(lines) + f"\n\n{_where(rows[0], text)}; stock → shared.\n"


_LEVELS = {
    "none": "nothing (stock)",
    "few-shot": "the examples",
    "problem": "each problem's prompt",
    "two-level": "examples, then problems",
}


def _pairs(rows: list[Row], column: str) -> list[tuple[Row, Row]]:
    """Rows of stock and of ours, by a column."""
    ways = {(row[column], row["way"]): row for row in rows}
    values = dict.fromkeys(row[column] for row in rows)
    return [(ways[value, "stock"], ways[value, "shared"]) for value in values]


def _change(stock: Row, shared: Row, column: str, factor: float, unit: str) -> str:
    return f"{_value(stock, column, factor, unit)} → {_value(shared, column, factor, unit)}"


def _value(row: Row, column: str, factor: float, unit: str) -> str:
    if row["status"] != "ok":
        return row["status"]
    value = factor * float(row[column])
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"


def _where(row: Row, context: str = "") -> str:
    context = context or f"prompts of up to {int(row['prompt_tokens']):,} tokens"
    versions = f"torch {row['torch']}, transformers {row['transformers']}"
    model = row["model"].removeprefix("shape:")
    return f"{row['device']}, {model}, {row['dtype']}, {versions}; {context}, {row['new_tokens']} new tokens"
