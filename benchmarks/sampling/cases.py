"""Sampling cases as data, without torch: the tokens of one step drawn from logits, named sets, and their table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from hf_fastdecode.measurement.rows import Case, Measurement, by, markdown

from ..page_tables import cell, microseconds

GREEDY = "greedy"

SETTINGS: dict[str, dict[str, float]] = {
    "top_p0.95": {"top_p": 0.95},
    "top_k50": {"top_k": 50},
    "top_k50-top_p0.95": {"top_k": 50, "top_p": 0.95},
    "min_p0.05": {"min_p": 0.05},
    GREEDY: {},
}
"""What `generate` is given beside the temperature, by name; ``greedy`` is ``do_sample=False``."""

SAMPLING_WAYS = {"fast": "the sampling kernel", "hf": "transformers' processors, softmax and multinomial"}


@dataclass(frozen=True)
class SamplingCase(Case):
    """A token for each row of logits, which are over the temperature but for greedy decoding, as in `SETTINGS`."""

    rows: int
    vocabulary: int
    settings: str
    temperature: float = 0.8
    dtype: str = "bfloat16"

    @property
    def greedy(self) -> bool:
        return self.settings == GREEDY

    def bytes(self, itemsize: int) -> int:
        """Least bytes to move: every logit once."""
        return self.rows * self.vocabulary * itemsize

    def columns(self) -> dict[str, Any]:
        return (
            {"case": f"n{self.rows}-v{self.vocabulary}-{self.settings}"}
            | super().columns()
            | {"temperature": "" if self.greedy else self.temperature}
        )


SAMPLING_SETS: dict[str, tuple[SamplingCase, ...]] = {
    "grid": tuple(
        SamplingCase(rows, vocabulary, settings)
        for vocabulary, rows, settings in product((32_000, 128_256, 152_064), (1, 128, 1024), SETTINGS)
    ),
    "tiny": tuple(SamplingCase(rows, 300, settings) for rows, settings in product((1, 3), SETTINGS)),
}
"""Named sets: ``grid`` is every vocabulary, number of rows and setting; ``tiny`` is for a CPU."""


def sampling_table(rows: Sequence[Measurement]) -> str:
    """Microseconds of the kernel and of transformers' processors, a line for each case."""
    lines = []
    for case in by(rows, "case", "dtype"):
        first, fast, hf = next(iter(case.values())), case.get("fast"), case.get("hf")
        cells = [first["rows"], f"{int(first['vocabulary']):,}", first["settings"].replace("-", ", ")]
        floor = float(first["floor_us"])
        cells += [f"{floor:.1f}" if floor >= 1 else f"{floor:.2f}", *(cell(row, microseconds) for row in (fast, hf))]
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
