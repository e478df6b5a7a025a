"""Tables of the workloads' measurements."""

from __future__ import annotations

from collections.abc import Sequence

from ...measurement.rows import Row


def levels_table(rows: Sequence[Row]) -> str:
    """A line for each level of each point; beside it, what no sharing takes over its time."""
    head = ["problems", "samples", "sharing", *_TIMES, "none / this"]
    lines = [
        [row["problems"], row["samples"], row["way"], *_times(row), _ratio(row, rows, ("problems", "samples"), "none")]
        for row in rows
    ]
    return _markdown(head, lines)


def questions_table(rows: Sequence[Row]) -> str:
    """A line for each way of each number of questions; beside it, what stock takes over its time."""
    head = ["questions", "way", *_TIMES, "stock / this", "right"]
    lines = [
        [row["questions"], row["way"], *_times(row), _ratio(row, rows, ("questions",), "stock"), _right(row)]
        for row in rows
    ]
    return _markdown(head, lines)


_TIMES = ("prefill s", "decode s", "ms/step", "tokens prefilled", "KV MiB")


def _times(row: Row) -> list[str]:
    if row["status"] != "ok":
        return ["-"] * len(_TIMES)
    times = [f"{float(row[name]):.3g}" for name in ("prefill_s", "decode_s", "ms_per_step")]
    return [*times, f"{int(row['prefilled_tokens']):,}", f"{int(row['kv_bytes']) / 2**20:,.1f}"]


def _right(row: Row) -> str:
    return f"{row['correct']} of {row['questions']}" if row.get("correct") else "-"


def _ratio(row: Row, rows: Sequence[Row], same: Sequence[str], base: str) -> str:
    """The seconds of a call of the way `base` at the same point over this one's."""
    of = [one for one in rows if one["way"] == base and all(one[name] == row[name] for name in same)]
    if not of or row["status"] != "ok" or of[0]["status"] != "ok":
        return "-"
    return f"{float(of[0]['total_s']) / float(row['total_s']):.2f}x"


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    table = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in table)
