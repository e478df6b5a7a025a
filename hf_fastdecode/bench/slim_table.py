"""Rows of slim attention as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from ..measurement.rows import Row
from .markdown import head, line


def slim_table(rows: Sequence[Row]) -> str:
    """Microseconds, bytes and share of the bandwidth, a line for each row."""
    lines = head(["rows", "context", "way", "us", "GB", "of the bandwidth", "error", "what ran"])
    for row in rows:
        cells = [row["rows"], row["context"], row["way"].partition(":")[0]]
        if row["status"] == "ok":
            cells += [f"{float(row['us_p50']):.1f}", f"{float(row['bytes']) / 1e9:.3f}"]
            error = f"{float(row['error_ratio']):.2f}" if row["error_ratio"] else ""
            cells += [f"{100 * float(row['bandwidth_share']):.0f} %", error, row["variant"]]
        else:
            cells += [row["status"], f"{float(row['bytes']) / 1e9:.3f}", "", "", row["variant"] or row["way"]]
        lines.append(line(cells))
    first = rows[0]
    bandwidth = f"; bandwidth: {float(first['copy_tb_per_s']):.2f} TB/s" if first["copy_tb_per_s"] else ""
    return (
        "\n".join(lines)
        + f"\n\n{first['device']}, {first['heads']} heads of {first['head_dim']}, {first['dtype']}, torch "
        f"{first['torch']}; one layer, medians in a CUDA graph, cold L2; slim ways without the product with the "
        f"matrix from keys to values{bandwidth}; error: times PyTorch's.\n"
    )
