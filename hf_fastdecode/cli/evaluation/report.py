"""``eval report``: accuracy against latency of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...option_values import parse_counts
from ..console import note
from .option_groups import expand_option_groups
from .options import ReportOptions


@expand_option_groups
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", exists=True, file_okay=False)],
    reporting: ReportOptions,
    n: Annotated[
        str | None, typer.Option(help="Numbers of samples to show.", show_default="powers of two, and those timed")
    ] = None,
    rank: Annotated[bool, typer.Option("--rank/--no-rank", help="Rank samples by their log-probabilities.")] = True,
    seed: Annotated[int, typer.Option(help="Of the bootstrap and of Monte Carlo estimates.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="that of the run", file_okay=False)
    ] = None,
) -> None:
    """Show pass@n and pass@top-m against latency, and write metrics.json, curve.csv, pictures and report.html.

    All n follow exactly from one pool of samples per task. Accuracy and latency come from runs of their own, and are
    joined by n. Intervals are bootstrap intervals over tasks.
    """
    ns = None if n is None else parse_counts("n", n)
    write_and_show(folder, out or folder, reporting, ns=ns, rank=rank, seed=seed)


def write_and_show(
    folder: Path,
    out: Path,
    options: ReportOptions,
    *,
    ns: list[int] | None = None,
    rank: bool = True,
    seed: int = 0,
) -> None:
    """Write the report of a run and show its tables.

    Raises:
        CommandError: There is nothing to report on, or an option is out of its bounds.
    """
    from rich.console import Console

    from ...evals.report import report as build
    from ...evals.report import report_text, write_report

    found = build(folder, m=options.top_m if rank else None, ks=ns, seed=seed, deduplicate=options.check())
    files = write_report(found, out)
    Console().print(report_text(found))
    note("written: " + ", ".join(str(path) for path in files))
