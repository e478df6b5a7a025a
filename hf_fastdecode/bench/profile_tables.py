"""Where the time goes: what of an operator does not grow with the context, and attention's part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import linear_regression

from ..measurement.rows import Row
from ..measurement.shapes import SHAPES
from .markdown import CEILING, cases_of, head, line, one_node


def fixed_parts_table(rows: Sequence[Row]) -> str:
    """Lines through our microseconds against the context: what each 1K tokens take, and what is left without any.

    Of one sample, and of the kernel of nodes alone: elsewhere suffixes take their part. A line needs three contexts.
    """
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        alone = row["way"] == "ours-prefix" or (row["way"] == "ours" and row["rows"] == "1")
        if alone and row["status"] == "ok" and one_node(row):
            key = tuple(row[name] for name in ("way", "rows", "heads", "kv_heads", "suffix"))
            groups.setdefault(key, []).append(row)
    lines = head(
        ["way", "rows", "heads", "suffix", "contexts", "fixed", "each 1K tokens", "rate", "farthest from the line"]
    )
    for (way, count, heads, kv_heads, suffix), found in groups.items():
        contexts = [int(row["context"]) for row in found]
        if len(contexts) < 3:
            continue
        times = [float(row["us_p50"]) for row in found]
        per_token, fixed = linear_regression(contexts, times)
        farthest = max(abs(fixed + per_token * at - time) / time for at, time in zip(contexts, times, strict=True))
        key_bytes = 4 * int(kv_heads) * int(found[0]["head_dim"])
        flops = 4 * int(count) * int(heads) * int(found[0]["head_dim"])
        wide = flops / float(found[0]["matmul_tflop_per_s"]) > key_bytes / float(found[0]["copy_tb_per_s"])
        rate = f"{flops / per_token / 1e6:.0f} TFLOP/s" if wide else f"{key_bytes / per_token / 1e6:.2f} TB/s"
        cells = [way, count, f"{heads}/{kv_heads}", "" if way == "ours-prefix" else suffix]
        cells += [f"{min(contexts):,} to {max(contexts):,}", f"{fixed:.1f} us", f"{1024 * per_token:.2f} us", rate]
        lines.append(line([*cells, f"{farthest:.0%}"]))
    return "\n".join(lines) + "\n"


def steps_apart_table(rows: Sequence[Row]) -> str:
    """A step of each mode beside the same loop without attention, and what attention takes in a layer."""
    lines = head(["model", "context", "n", "mode", "a step", "without attention", "attention", "of a layer"])
    for ways in cases_of(rows):
        for mode, row in ways.items():
            ceiling = ways.get(mode + CEILING)
            if ceiling is None or {row["status"], ceiling["status"]} != {"ok"}:
                continue
            step, without = float(row["ms_per_step"]), float(ceiling["ms_per_step"])
            layers = SHAPES[row["shape"]]["num_hidden_layers"]
            cells = [row["shape"], f"{int(row['context']):,}", row["samples"], mode]
            cells += [f"{value:.2f} ms" for value in (step, without, step - without)]
            lines.append(line([*cells, f"{1e3 * (step - without) / layers:.0f} us"]))
    return "\n".join(lines) + "\n"
