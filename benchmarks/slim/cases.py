"""Slim attention cases as data, without torch: a decode step of one layer over a slim cache, ways and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hf_fastdecode.measurement.rows import Case, Measurement, markdown

RANK_DIVISOR = 8
"""Numbers per cached key for each V-coordinate of ``slim-k+r``."""

_EIGHT_BITS = {"int8": "int8", "fp8": "float8_e4m3fn"}

SLIM_WAYS = {
    "flash": "PyTorch's attention over keys and values",
    "forest": "this package's over them as suffixes",
    "forest-prompt": "this package's over them as nodes",
    "slim-k": "a slim cache of keys alone",
    "slim-k+r": "of keys and an eighth as many V-coordinates",
    "slim-k-two-launches": "by the kernel for GPUs without thread block clusters",
    "slim-k-int8": "keys in 8 bits with scales, dequantised on chip",
    "slim-k+r-int8": "these with V-coordinates",
    "slim-k-fp8": "keys in fp8",
}


@dataclass(frozen=True)
class SlimCase(Case):
    """One decode step of one multi-head attention layer, over so many cached tokens of each row, the context."""

    rows: int
    context: int
    heads: int = 32
    head_dim: int = 128
    dtype: str = "float16"

    @property
    def columns_of_keys(self) -> int:
        return self.heads * self.head_dim

    def rank(self, way: str) -> int:
        return self.columns_of_keys // RANK_DIVISOR if way.startswith("slim-k+r") else 0

    def cache_dtype(self, way: str) -> str:
        return _EIGHT_BITS.get(way.partition(":")[0].rpartition("-")[2], self.dtype)

    def bytes(self, way: str, itemsize: int) -> int:
        """Least bytes that must move: the cache once, scales of 2 bytes where `itemsize` is 1, and the averages."""
        tokens = self.rows * self.context
        if not way.startswith("slim"):
            return 2 * (tokens + self.rows) * self.columns_of_keys * itemsize
        width = self.columns_of_keys + self.rank(way)
        scales = 0
        if itemsize == 1:
            scales = 2 * (self.heads + -(-self.rank(way) // self.head_dim))
        return tokens * (width * itemsize + scales) + self.rows * self.heads * width * 4

    def columns(self) -> dict[str, Any]:
        return {"case": f"n{self.rows}-m{self.context}"} | super().columns()


SLIM_SETS: dict[str, tuple[SlimCase, ...]] = {
    "grid": tuple(SlimCase(rows, context) for rows, context in product((1, 8), (32_768, 131_072))),
    "tiny": (SlimCase(1, 40, heads=2, head_dim=32), SlimCase(2, 20, heads=2, head_dim=32)),
}
"""Named sets: ``grid`` is for a GPU; ``tiny`` is for a CPU."""


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
