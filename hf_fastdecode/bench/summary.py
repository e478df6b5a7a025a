"""What the README and other pages show of the committed measurements: tables between markers, and figures.

``python -m hf_fastdecode.bench.summary`` rewrites them all; a test fails when a table does not match its CSV file.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import typer

from ..files import read_rows
from ..measurement.rows import Measurement
from ..measurement.tables import replace_between
from . import RESULTS
from .figures import draw_stock_beside_shared, plot
from .generate import table as generate
from .ops.table import fixed_parts_table, ops_digest, ops_table, ops_trees_table
from .parallel.table import attention_times_table, parallel_table, predicted_table
from .programs_table import evaluation_table, programs_table, rollouts_table, training_table, vllm_table
from .sampling.table import sampling_table
from .slim.table import slim_table
from .workloads.tables import levels_page, questions_page, samples_page

PICTURE = RESULTS / "generate.png"
_ROOT = RESULTS.parents[2]
PAGES = (_ROOT / "README.md", RESULTS / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
"""The pages of a clone; an installed package has none."""

_MARKERS = re.compile(r"(<!-- rows: (?P<file>[\w.*-]+)(?:, (?P<view>[\w ]+))? -->\n).*?(<!-- end rows -->)", re.DOTALL)

_MOST_LINES = 16  # of operators; more are summed up


def table(rows: list[Measurement]) -> str:
    """A Markdown table of measurements, by the command that made them."""
    if "ranks" in rows[0]:
        return parallel_table(rows)
    if "vocabulary" in rows[0]:
        return sampling_table(rows)
    if "busy_ms" in rows[0]:
        return generate.profile_table(rows)
    if "caches" in rows[0]:
        return generate.first_calls_table(rows)
    if "to_token" in rows[0]:
        return generate.completions_table(rows)
    if "bandwidth_share" in rows[0]:
        return slim_table(rows)
    if "case" in rows[0]:
        return ops_table(rows) if len({row["case"] for row in rows}) <= _MOST_LINES else ops_digest(rows)
    if {"stock", "shared"} <= {row["way"] for row in rows} <= {"stock", "shared", "compile", "vllm"}:
        return generate.stock_beside_shared(rows)
    return generate.generate_tables(rows)


_VIEWS: dict[str | None, Callable[[list[Measurement]], str]] = {
    None: table,
    "trees": generate.trees_table,
    "loops": generate.loops_table,
    "many rows": generate.many_rows_table,
    "steps and memory": generate.steps_and_memory_table,
    "fixed parts": fixed_parts_table,
    "operator trees": ops_trees_table,
    "steps apart": generate.steps_apart_table,
    "training": training_table,
    "evaluation": evaluation_table,
    "programs": programs_table,
    "rollouts": rollouts_table,
    "vllm": vllm_table,
    "predicted": predicted_table,
    "times": attention_times_table,
    "samples": samples_page,
    "levels": levels_page,
    "questions": questions_page,
}
"""What a marker can ask for behind the file's name."""


def refreshed(text: str) -> str:
    """The text with every table between markers made anew from its CSV file."""
    return replace_between(text, _MARKERS, lambda place: _VIEWS[place["view"]](_rows(place["file"])))[0]


def _rows(files: str) -> list[Measurement]:
    """The rows of a file, or of all files of a pattern."""
    return [row for path in sorted(RESULTS.glob(files)) for row in read_rows(path)]


def main() -> None:
    """Rewrite the tables and the figures from the committed measurements."""
    draw_stock_beside_shared(read_rows(RESULTS / "generate.csv"), PICTURE)
    plot(read_rows(RESULTS / "ops.csv"), RESULTS / "ops")
    for page in PAGES:
        page.write_text(refreshed(page.read_text()))


if __name__ == "__main__":
    typer.run(main)
