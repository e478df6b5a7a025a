"""Rows of `generate` beside those of vLLM on the same GPU, as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from ..measurement.rows import Row
from .generate_cases import PromptTree
from .markdown import cases_of, generate_where, head, line

_WAYS = {
    "vllm": "vLLM",
    "vllm-cascade": "with cascade",
    "shared": "`enable(model)`",
    "compile": "compiled",
}


def vllm_table(rows: Sequence[Row]) -> str:
    """One line for each case: the call and, in parentheses, a step of each way; the first token, vLLM's → ours."""
    lines = head(["model", "prompts", "n", *_WAYS.values(), "first token, vLLM → compiled"])
    for ways in cases_of(rows):
        first = next(iter(ways.values()))
        tree = PromptTree.of_row(first["shape"])
        prompts = 1 if tree is None else tree.problems
        cells = [first["shape"].partition(" ")[0], f"{prompts} of {int(first['context']):,}"]
        cells += [str(int(first["samples"]) // prompts), *(_call(ways.get(way)) for way in _WAYS)]
        tokens = (f"{float(ways[way]['prefill_s']):.3f} s" for way in ("vllm", "compile"))
        lines.append(line([*cells, " → ".join(tokens)]))
    ours, theirs = (next(row for row in rows if row["way"] == way) for way in ("compile", "vllm"))
    where = f"{generate_where([ours])}, {theirs['ran'].partition(',')[0]}, {ours['new_tokens']} new tokens"
    legend = 'compiled: `enable(model, mode="compile")`'
    return "\n".join(lines) + f"\n\n{where}; a call (a step); {legend}; empty: not measured; medians.\n"


def _call(row: Row | None) -> str:
    return "" if row is None else f"{float(row['total_s']):.2f} s ({float(row['ms_per_step']):.1f} ms)"
