"""Rows of programs that call `generate` as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ..measurement.rows import Row
from .markdown import head, line

_HARNESSES: Final = ("lm-eval", "evalplus", "pipeline")
_LEAST_FACTOR: Final = 1.2  # of one run each; less is not told from noise


def training_table(rows: Sequence[Row]) -> str:
    """The trainers' lines."""
    return clients_table([row for row in rows if row["program"].startswith("TRL")], same="weights")


def evaluation_table(rows: Sequence[Row]) -> str:
    """The lines of evaluation harnesses and of pipelines."""
    return clients_table([row for row in rows if row["program"] in _HARNESSES], same="samples")


def programs_table(rows: Sequence[Row]) -> str:
    """The lines of all programs with the embedded model."""
    return clients_table([row for row in rows if row["model"] == "embedded"], same="results")


def rollouts_table(rows: Sequence[Row]) -> str:
    """Rollouts on a GPU, stock → enabled: the first one compiles kernels and captures steps, the others do not."""
    stock, enabled = (next(row for row in rows if row["way"] == way) for way in ("stock", "enabled"))
    seconds = [
        [float(row[name]) for row in (stock, enabled)] for name in ("first_rollout_s", "rollout_s")
    ]  # [first or later][stock or enabled]
    cells = [f"{before:.1f} → {now:.1f} s ({before / now:.1f}x)" for before, now in seconds]
    tokens = [f"{int(row['prefilled_tokens']):,}" for row in (stock, enabled)]
    lines = head(["program", "model", "a rollout", "the first", "later ones", "tokens prefilled, all rollouts"])
    what = f"{stock['rows']} completions of {stock['new_tokens']} tokens, prompts of up to {stock['prompt_tokens']}"
    lines.append(line([stock["program"], stock["model"], what, *cells, " → ".join(tokens)]))
    where = f"{stock['device']}, torch {stock['torch']}, transformers {stock['transformers']}"
    return "\n".join(lines) + f"\n\n{where}, bf16 weights; stock → enabled, which ran: {enabled['ran']}.\n"


def clients_table(rows: Sequence[Row], *, same: str) -> str:
    """Seconds in `generate` and tokens prefilled, stock → enabled, a line for each case; small factors are none.

    Args:
        rows: For each program, model and setting a stock row and an enabled one.
        same: What an enabled row whose status is ok has in common with stock's.
    """
    found: dict[tuple[str, ...], dict[str, Row]] = {}
    for row in rows:
        found.setdefault(tuple(row[name] for name in ("program", "model", "setting")), {})[row["way"]] = row
    lines = head(["program", "model", "setting", "seconds in generate", "tokens prefilled", f"same {same}"])
    for case, ways in found.items():
        stock, enabled = ways["stock"], ways["enabled"]
        seconds = [float(row["generate_s"]) for row in (stock, enabled)]
        tokens = [int(row["prefilled_tokens"]) for row in (stock, enabled)]
        factor = seconds[0] / seconds[1]
        gain = f"{factor:.1f}x" if factor >= _LEAST_FACTOR else "none"
        cells = [f"{seconds[0]:.1f} → {seconds[1]:.1f} ({gain})"]
        cells += [f"{tokens[0]:,} → {tokens[1]:,}", "yes" if enabled["status"] == "ok" else enabled["status"]]
        lines.append(line([*case, *cells]))
    first = rows[0]
    where = f"{first['device']}, torch {first['torch']}, transformers {first['transformers']}"
    return "\n".join(lines) + f"\n\n{where}; stock → enabled; medians where a case was run more than once.\n"
