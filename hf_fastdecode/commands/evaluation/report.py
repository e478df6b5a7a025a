"""``eval report``: accuracy against latency of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...command_errors import CommandError
from ..console import note
from .options import Dedup, TopM


def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", exists=True, file_okay=False)],
    top_m: TopM = 3,
    deduplicate: Dedup = "text",
    k: Annotated[
        str | None, typer.Option("--n", help="Numbers of samples to show.", show_default="powers of two")
    ] = None,
    rank: Annotated[bool, typer.Option("--rank/--no-rank", help="Rank samples by their log-probabilities.")] = True,
    seed: Annotated[int, typer.Option(help="Of the bootstrap and of Monte Carlo estimates.")] = 0,
) -> None:
    """Show pass@n and pass@top-m against latency, and write metrics.json, curve.csv, pictures and report.html.

    All n follow exactly from one pool of samples per task. Accuracy and latency come from runs of their own, and are
    joined by n. Intervals are bootstrap intervals over tasks.
    """
    write_and_show(folder, top_m=top_m, deduplicate=deduplicate, counts=k, rank=rank, seed=seed)


def write_and_show(
    folder: Path, *, top_m: int, deduplicate: str, counts: str | None, rank: bool = True, seed: int = 0
) -> None:
    """Write the report into the folder and show its tables.

    Raises:
        CommandError: There is nothing to report on, or an option is out of its bounds.
    """
    from rich.console import Console

    from ...evals.report import report as build
    from ...evals.report import report_text, write_report
    from .options import parse_counts

    if deduplicate not in ("text", "ast"):
        raise CommandError(f"--deduplicate must be text or ast, got {deduplicate!r}")
    found = build(
        folder,
        m=top_m if rank else None,
        ks=None if counts is None else parse_counts(counts),
        seed=seed,
        deduplicate="ast" if deduplicate == "ast" else "text",
    )
    files = write_report(found, folder)
    Console().print(report_text(found))
    note("written: " + ", ".join(str(path) for path in files))
