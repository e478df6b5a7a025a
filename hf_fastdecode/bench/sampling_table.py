"""Rows of sampling as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from .rows import Row


def sampling_table(rows: Sequence[Row]) -> str:
    """Microseconds of the kernel and of transformers' processors, a line for each case."""
    cases: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        cases.setdefault((row["case"], row["dtype"]), {})[row["way"]] = row
    lines = ["| rows | vocabulary | settings | floor | fast | hf | fast over floor | hf over fast |", "|" + "---|" * 8]
    for case in cases.values():
        first, fast, hf = next(iter(case.values())), case.get("fast"), case.get("hf")
        cells = [first["rows"], f"{int(first['vocabulary']):,}", first["settings"].replace("-", ", ")]
        cells += [f"{float(first['floor_us']):.1f}", _time(fast), _time(hf)]
        cells.append(f"{float(fast['over_floor']):.2f}x" if fast and fast["status"] == "ok" else "")
        both = fast and hf and fast["status"] == hf["status"] == "ok"
        cells.append(f"{float(hf['us_p50']) / float(fast['us_p50']):.1f}x" if both and fast and hf else "")
        lines.append("| " + " | ".join(cells) + " |")
    first = rows[0]
    temperatures = ", ".join(dict.fromkeys(row["temperature"] for row in rows if row["temperature"]))
    where = f"{first['device']}, {first['dtype']} logits, torch {first['torch']}, transformers {first['transformers']}"
    where += f", temperature {temperatures}" if temperatures else ""
    return (
        "\n".join(lines)
        + f"\n\n{where}; microseconds, medians; fast in a CUDA graph, cold L2; hf as `generate` calls it; floor: the "
        f"logits read once at {float(first['copy_tb_per_s']):.2f} TB/s.\n"
    )


def _time(row: Row | None) -> str:
    """Microseconds, or why there are none."""
    if row is None:
        return ""
    return f"{float(row['us_p50']):.1f}" if row["status"] == "ok" else row["status"].partition(":")[0]
