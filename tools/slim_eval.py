"""Writes docs/slim-measurements.md's table of slim checkpoints beside the embedded model, on the embedded tasks.

Run ``python -m tools.slim_eval runs/*`` from the folder of the slim checkpoints, with a clone on ``PYTHONPATH``, after
``hf-fastdecode eval run`` of each of them and of the embedded model in their dtypes, all with one seed. Rows of other
models and dtypes stay.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from hf_fastdecode.conversion.source import REPORT
from hf_fastdecode.evals.metrics import Ranker, build_pools, pass_at_ranker
from hf_fastdecode.evals.records import read_samples, read_verdicts
from hf_fastdecode.evals.run_folder import SAMPLES, SETTINGS, VERDICTS
from hf_fastdecode.files import read_rows, write_rows
from hf_fastdecode.measurement.rows import Measurement
from hf_fastdecode.model_names import EMBEDDED

from .pages import DOCS, replace_table

PAGE: Final = DOCS / "slim-measurements.md"
ROWS: Final = DOCS / "slim-eval.csv"

METRICS: Final[dict[str, tuple[Ranker, int]]] = {
    "pass@1": ("oracle", 1),
    "pass@32": ("oracle", 32),
    "pass@top3": ("mean_logp", 32),
}
"""Name -> ranker, and number of samples."""


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        settings: Of the run.
        texts: Completions, by task and index.
        tasks: Ids.
        scores: Of each metric, chances ``[tasks]``.
    """

    settings: dict[str, Any]
    texts: dict[tuple[str, int], str]
    tasks: list[str]
    scores: dict[str, NDArray[np.float64]]


def read_run(folder: Path) -> Run:
    """Read samples and verdicts of a run's folder."""
    samples = read_samples(folder / SAMPLES)
    pools, left_out = build_pools(samples, read_verdicts(folder / VERDICTS))
    if left_out:
        raise ValueError(f"{folder}: {left_out} samples have no verdict; score them first")
    settled = [pool.settle()[0] for pool in pools]
    scores = {
        name: np.array([pass_at_ranker(pool, ranker, [n], m=3)[0][0] for pool in settled])
        for name, (ranker, n) in METRICS.items()
    }
    settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
    texts = {(one.task_id, one.index): one.completion for one in samples}
    return Run(settings, texts, [pool.task_id for pool in settled], scores)


def compare(run: Run, base: Run) -> dict[str, float]:
    """Each metric of a run and its change from a run of the same or more tasks, with standard errors over tasks.

    Changes are paired: the error is that of the mean over tasks of the difference.
    """
    same = [text == base.texts[at] for at, text in run.texts.items()]
    found = {"same_samples": float(np.mean(same))}
    places = [base.tasks.index(task) for task in run.tasks]
    for name, values in run.scores.items():
        for column, numbers in ((name, values), (f"{name} change", values - base.scores[name][places])):
            found[column] = float(numbers.mean())
            found[f"{column} error"] = float(numbers.std(ddof=1) / len(numbers) ** 0.5)
    return found


def rows(runs: list[Run]) -> list[dict[str, Any]]:
    """A row a run: where it comes from, bytes, and what `compare` finds beside the embedded model in its dtype."""
    bases = {run.settings["dtype"]: run for run in runs if run.settings["model"] == EMBEDDED}
    found = []
    for run in runs:
        own = {name: run.settings[name] for name in ("model", "dtype", "way", "seed", "n")}
        source = {name: value for name, value in run.settings["provenance"].items() if isinstance(value, str)}
        sizes: dict[str, Any] = {"plan": "kv", "cache_share": 1.0}
        if own["model"] != EMBEDDED:
            report = json.loads((Path(own["model"]) / REPORT).read_text(encoding="utf-8"))
            sizes = {"plan": report["plan"], "cache_share": 1 - report["saved"]}
        sizes["tasks"] = len(run.tasks)
        found.append(source | own | sizes | compare(run, bases[own["dtype"]]))
    return found


def table(found: list[Measurement]) -> str:
    """The rows in Markdown: percentages, and changes in points."""
    head = ["model", "prompts", "of KV's bytes", "tasks", "same samples", *METRICS]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in found:
        slim = row["model"] != EMBEDDED
        plan = {"kv": "ordinary", "auto": "**slim**", "k": "slim, keys alone"}[row["plan"]]
        prompts = "shared" if row["way"] == "shared" else "slim"
        cells = [f"{plan}, {row['dtype']}", prompts, f"{float(row['cache_share']):.1%}", row["tasks"]]
        cells.append(f"{float(row['same_samples']):.1%}" if slim else "")
        for name in METRICS:
            value, error, change, paired = (
                100 * float(row[column])
                for column in (name, f"{name} error", f"{name} change", f"{name} change error")
            )
            cells.append(f"{value:.1f} ({change:+.1f} ± {paired:.1f})" if slim else f"{value:.1f} ± {error:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def replace_rows(known: Sequence[Measurement], found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that were measured in the places of earlier ones of the same model, dtype and way; all others are kept."""

    def case(row: Measurement | dict[str, Any]) -> tuple[Any, ...]:
        return row["model"], row["dtype"], row["way"]

    measured = {case(row): row for row in found}
    kept = [measured.pop(case(row), dict(row)) for row in known]
    return [*kept, *measured.values()]


def main() -> None:
    """Write the rows, and the table into the page."""
    write_rows(ROWS, replace_rows(read_rows(ROWS), rows([read_run(Path(folder)) for folder in sys.argv[1:]])))
    text = table(read_rows(ROWS))
    replace_table(PAGE, "tools.slim_eval", text)
    print(text, end="")


if __name__ == "__main__":
    main()
