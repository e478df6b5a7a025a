"""Measured sampling as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from hf_fastdecode.measurement.rows import Measurement, by, markdown

from ..page_tables import cell


def sampling_table(rows: Sequence[Measurement]) -> str:
    """Microseconds of the kernel and of transformers' processors, a line for each case."""
    lines = []
    for case in by(rows, "case", "dtype"):
        first, fast, hf = next(iter(case.values())), case.get("fast"), case.get("hf")
        cells = [first["rows"], f"{int(first['vocabulary']):,}", first["settings"].replace("-", ", ")]
        floor = float(first["floor_us"])
        cells += [f"{floor:.1f}" if floor >= 1 else f"{floor:.2f}", *(cell(row, _microseconds) for row in (fast, hf))]
        cells.append(f"{float(fast['over_floor']):.2f}x" if fast and fast["status"] == "ok" else "")
        both = fast and hf and fast["status"] == hf["status"] == "ok"
        cells.append(f"{float(hf['us_p50']) / float(fast['us_p50']):.1f}x" if both and fast and hf else "")
        lines.append(cells)
    first = rows[0]
    temperatures = ", ".join(dict.fromkeys(row["temperature"] for row in rows if row["temperature"]))
    where = f"{first['device']}, {first['dtype']} logits, torch {first['torch']}, transformers {first['transformers']}"
    where += f", temperature {temperatures}" if temperatures else ""
    return markdown(
        ["rows", "vocabulary", "settings", "floor", "fast", "hf", "fast over floor", "hf over fast"],
        lines,
        f"{where}; microseconds, medians; fast in a CUDA graph, cold L2; hf as `generate` calls it; floor: the logits "
        f"read once at {float(first['copy_tb_per_s']):.2f} TB/s.",
    )


def _microseconds(row: Measurement) -> str:
    return f"{float(row['us_p50']):.1f}"
