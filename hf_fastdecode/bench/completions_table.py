"""Rows of growing completions as Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence

from ..measurement.rows import Row
from .markdown import by, cell, generate_where, head, line

_CASE = ("shape", "context", "samples", "new_tokens", "dtype", "from_token", "to_token")


def completions_table(rows: Sequence[Row]) -> str:
    """Milliseconds of a step in each way, a line for each span, beside what reading the keys and values takes."""
    ways = list(dict.fromkeys(row["way"] for row in rows))
    lines = head(["model", "context", "n", "tokens of a completion", "reading keys and values", *ways])
    for case in by(rows, *_CASE):
        first = next(iter(case.values()))
        floor = next((row["kv_floor_ms"] for row in case.values() if row["kv_floor_ms"]), "")
        cells = [first["shape"], f"{int(first['context']):,}", first["samples"]]
        cells.append(f"{int(first['from_token']):,} to {int(first['to_token']):,}")
        cells.append(f"{float(floor):.2f}" if floor else "")
        cells += [cell(case.get(way), lambda row: f"{float(row['ms_per_step']):.2f}") for way in ways]
        lines.append(line(cells))
    return "\n".join(lines) + f"\n\n{generate_where(rows)}; ms, means over the steps of one call.\n"


def steps_and_memory_table(rows: Sequence[Row]) -> str:
    """A line for each case and way: a step, and the most memory over the weights, or why there is none.

    Args:
        rows: Of growing completions; or of whole calls, which do not say how long reading keys and values takes.
    """
    times = {"ms_per_step": "a step", "kv_floor_ms": "reading keys and values"}
    times = {name: title for name, title in times.items() if name in rows[0]}
    lines = head(["model", "context", "n", "way", *times.values(), "memory over the weights"])
    for row in rows:
        found = [row["status"], *[""] * len(times)]
        if row["status"] == "ok":
            found = [*(f"{float(row[name]):.2f} ms" for name in times), f"{float(row['peak_bytes']) / 2**30:.1f} GiB"]
        lines.append(line([row["shape"], f"{int(row['context']):,}", row["samples"], row["way"], *found]))
    return "\n".join(lines) + f"\n\n{generate_where(rows)}; means over the steps of one call.\n"
