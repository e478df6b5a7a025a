"""Tables and figures of README and other pages, from the committed measurements."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from hf_fastdecode.files import read_rows
from hf_fastdecode.measurement.rows import Measurement

from . import RESULTS, programs_table
from .figures import plot
from .forward.cases import forward_table
from .generate import table as generate
from .ops.table import fixed_parts_table, ops_digest, ops_table, ops_trees_table
from .page_tables import replace_between
from .parallel.table import attention_times_table, parallel_table, predicted_table
from .ratios import draw_ratios, orders_table, ratios_table
from .readme import draw_readme_figures, readme_rows, readme_table
from .sampling.cases import sampling_table
from .slim.cases import slim_table
from .workloads.tables import levels_page, questions_page, samples_page

_ROOT = RESULTS.parents[1]
PAGES = (_ROOT / "README.md", RESULTS / "README.md", *sorted((_ROOT / "docs").glob("*.md")))
"""The pages of a clone; an installed package has none."""
PICTURES = _ROOT / "docs" / "pictures"
COMMITS = RESULTS / "commits.txt"
"""Lines of a commit that rows name and its date; git knows it, but a copy of the files has no git."""

_MARKERS = re.compile(
    r"(<!-- rows: (?P<file>[\w.*+-]+)(?:, (?P<view>[\w ]+))? -->\n).*?(<!-- end rows -->)", re.DOTALL
)

_MOST_LINES = 16  # of operators; more are summed up


_BY_COLUMN: dict[str, Callable[[list[Measurement]], str]] = {
    "ranks": parallel_table,
    "vocabulary": sampling_table,
    "busy_ms": generate.profile_table,
    "caches": generate.first_calls_table,
    "to_token": generate.completions_table,
    "bandwidth_share": slim_table,
    "checkpointing": forward_table,
}
"""Tables of rows that alone have a column."""


def table(rows: list[Measurement]) -> str:
    """A Markdown table of measurements, by the command that made them."""
    if column := next((name for name in _BY_COLUMN if name in rows[0]), None):
        return _BY_COLUMN[column](rows)
    if "case" in rows[0]:
        return ops_table(rows) if len({row["case"] for row in rows}) <= _MOST_LINES else ops_digest(rows)
    if {"stock", "shared"} <= {row["way"] for row in rows} <= {"stock", "shared", "vllm"}:
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
    **{name: partial(programs_table.clients_table, name=name) for name in programs_table.CLIENTS},
    "rollouts": programs_table.rollouts_table,
    "divided rollouts": programs_table.divided_rollouts_table,
    "grpo steps": programs_table.grpo_steps_table,
    "grpo steps in brief": programs_table.grpo_steps_in_brief,
    "ratios": ratios_table,
    "orders of sums": orders_table,
    "forward in brief": partial(forward_table, brief=True),
    "vllm": programs_table.vllm_table,
    "families": programs_table.families_table,
    "experts": generate.experts_table,
    "readme": readme_table,
    "predicted": predicted_table,
    "times": attention_times_table,
    "samples": samples_page,
    "levels": levels_page,
    "questions": questions_page,
}
"""What a marker can ask for after the file's name."""

_CHOSEN: dict[str | None, Callable[[list[Measurement]], list[Measurement]]] = {
    "readme": readme_rows,
    "families": programs_table.beside_vllm,
    "experts": generate.with_experts,
}
"""The rows that a view shows, where not all."""


def refreshed(text: str) -> str:
    """The text with every table between markers made anew from its CSV files, and the ages of their rows."""

    def made(place: re.Match[str]) -> str:
        rows = _CHOSEN.get(place["view"], list)(_rows(place["file"]))
        found = _VIEWS[place["view"]](rows).rstrip()
        *_, last = found.splitlines()
        return found + ("\n\n" if last.startswith("|") else " ") + ages(rows) + "\n"

    return replace_between(text, _MARKERS, made)[0]


def ages(rows: Sequence[Measurement]) -> str:
    """A sentence on the commits that rows were measured at, with their dates, and on versions that differ."""
    ours = [row for row in rows if row["commit"]]  # another program names its own version
    commits = {row["commit"].partition("+")[0][:7] for row in ours}
    by_date: dict[str, list[str]] = {}
    for commit in sorted(commits):
        by_date.setdefault(_dates().get(commit, ""), []).append(commit)
    parts = [f"{', '.join(found)}{f' ({date})' if date else ''}" for date, found in sorted(by_date.items())]
    libraries = [
        f" Of {name} {' and '.join(versions)}."
        for name in ("torch", "transformers")
        if len(versions := sorted({row[name] for row in ours})) > 1
    ]
    several = "several commits: " if len(commits) > 1 else ""
    return f"Measured at {several}{', '.join(parts)}.{''.join(libraries)}"


@cache
def _dates() -> dict[str, str]:
    return dict(line.split() for line in COMMITS.read_text().splitlines())


def _write_dates() -> None:
    """Add the dates of commits that git knows here."""
    known = _dates() if COMMITS.exists() else {}
    named = {row["commit"].partition("+")[0][:7] for path in RESULTS.glob("*.csv") for row in read_rows(path)} - {""}
    for commit in named - known.keys():
        command = ["git", "show", "--no-patch", "--format=%cs", commit]
        found = subprocess.run(command, cwd=RESULTS, capture_output=True, text=True, check=False)
        if not found.returncode:
            known[commit] = found.stdout.strip()
    COMMITS.write_text("".join(f"{commit} {date}\n" for commit, date in sorted(known.items())))
    _dates.cache_clear()


def _rows(files: str) -> list[Measurement]:
    """The rows of files, each of which may be a pattern, with ``+`` between them."""
    paths: list[Path] = [path for one in files.split("+") for path in sorted(RESULTS.glob(one))]
    return [row for path in paths for row in read_rows(path)]


def rewrite_pages() -> None:
    """Rewrite the tables and the figures from the committed measurements."""
    _write_dates()
    draw_readme_figures(_rows("generate.csv+generate-vllm.csv"), PICTURES)
    plot(read_rows(RESULTS / "ops.csv"), RESULTS / "ops")
    for path in RESULTS.glob("rollout-ratios*.csv"):
        draw_ratios(read_rows(path), path.with_suffix(".png"))
    for page in PAGES:
        page.write_text(refreshed(page.read_text()))
