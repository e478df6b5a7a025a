"""Measured slim attention as a Markdown table."""

from __future__ import annotations

from collections.abc import Sequence

from hf_fastdecode.measurement.rows import Measurement, markdown


def slim_table(rows: Sequence[Measurement]) -> str:
    """Microseconds, bytes and share of the bandwidth, a line for each measurement."""
    lines = []
    for row in rows:
        cells = [row["rows"], row["context"], row["way"].partition(":")[0]]
        size = f"{float(row['bytes']) / 1e9:.3f}"
        if row["status"] == "ok":
            error = f"{float(row['error_ratio']):.2f}" if row["error_ratio"] else ""
            cells += [f"{float(row['us_p50']):.1f}", size, f"{100 * float(row['bandwidth_share']):.0f} %"]
            cells += [error, row["variant"]]
        else:
            cells += [row["status"], size, "", "", row["variant"] or row["way"]]
        lines.append(cells)
    first = rows[0]
    bandwidth = f"; bandwidth: {float(first['copy_tb_per_s']):.2f} TB/s" if first["copy_tb_per_s"] else ""
    return markdown(
        ["rows", "context", "way", "us", "GB", "of the bandwidth", "error", "what ran"],
        lines,
        f"{first['device']}, {first['heads']} heads of {first['head_dim']}, {first['dtype']}, torch {first['torch']}; "
        "one layer, medians in a CUDA graph, cold L2; slim ways without the product with the matrix from keys to "
        f"values{bandwidth}; error: times PyTorch's.",
    )
