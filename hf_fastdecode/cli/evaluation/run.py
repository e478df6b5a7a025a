"""``eval run`` and ``eval report``: draw, time and score samples, and report accuracy against latency."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...evals.run_folder import VERDICTS
from ...evals.sandbox import Sandbox
from ...evals.tasks import TaskSet
from ..checks import parse_counts
from ..console import note, quiet_libraries
from ..options import expand_option_groups
from ..tables import prints_tables, show_tables
from .generate import Options, draw_samples, launched, load_suitable_tasks, prepare
from .latency import time_samples
from .options import Out, ReportOptions, SandboxOptions, run_folder
from .stored import check_references, judge_samples


@expand_option_groups
def run(
    options: Options,
    sandbox: SandboxOptions,
    reporting: ReportOptions,
    latency: Annotated[
        int, typer.Option(help="Prompts that are timed for each n, the first ones; 0 times nothing.", min=0)
    ] = 3,
    out: Out = None,
) -> None:
    """Draw samples, time drawing, score in a sandbox, and report pass@n and pass@top-m against latency.

    Without arguments: the embedded model on the embedded tasks, offline. Everything goes into a folder, from which the
    same command goes on after an interruption. Behind `torchrun ... -m hf_fastdecode` a `--` comes before the command,
    else torchrun takes `--n` for its own. The steps are commands of their own: generate, latency, score, report.

    Examples:

        hf-fastdecode eval run
        hf-fastdecode eval run --limit 20 --n 1,8 --latency 1
        hf-fastdecode eval run --model MODEL --task mbpp --n 1,4,16,64 \\
            --out runs/mbpp
        torchrun --nproc-per-node 2 -m hf_fastdecode -- eval run --model MODEL \\
            --n 1,64
    """
    reporting.check()
    chosen = load_suitable_tasks(options)
    place = sandbox.make(chosen.tasks)
    rank, processes = launched(options.model.device)
    folder = run_folder(out, options.tasks.task, options.model.model)
    if rank == 0:
        note(_scoring(chosen, options.draw.check()[-1], place, folder))
        verdicts = check_references(chosen.tasks, place, sandbox)
        if failing := [verdict for verdict in verdicts if not verdict.passed]:
            note(
                f"{len(failing)} of {len(verdicts)} reference solutions fail here, first that of task "
                f"{failing[0].task_id} ({failing[0].status}: {failing[0].detail}); `hf-fastdecode eval check` lists "
                "them"
            )
    with quiet_libraries(warnings=True):
        prepared = prepare(options, chosen)
        draw_samples(prepared, folder, shared=processes > 1)
        if processes > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
        if rank > 0:
            return
        if latency:
            time_samples(prepared, folder, latency, [options.decoding.mode])
    from ...evals.run_folder import merged_samples

    samples = merged_samples(folder, [task.task_id for task in chosen.tasks], prepared.counts[-1])
    judge_samples(chosen.tasks, samples, folder / VERDICTS, place, sandbox)
    write_and_show(folder, folder, reporting)


def _scoring(chosen: TaskSet, n: int, place: Sandbox, folder: Path) -> str:
    """What a run is going to score, and where, in one line."""
    count, languages = len(chosen.tasks), sorted({task.language for task in chosen.tasks})
    return (
        f"scores {n * count:,} samples, {n:,} of each of {count:,} tasks ({chosen.name}, {', '.join(languages)}), "
        f"in the sandbox {place.name}; samples go to {folder}"
    )


@prints_tables
@expand_option_groups
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", exists=True, file_okay=False)],
    reporting: ReportOptions,
    n: Annotated[
        str | None,
        typer.Option(
            help="Numbers of samples to show, commas between.", show_default="powers of two, and those timed"
        ),
    ] = None,
    rank: Annotated[bool, typer.Option("--rank/--no-rank", help="Rank samples by their log-probabilities.")] = True,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap and of Monte Carlo estimates.", min=0)] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder to write to.", show_default="that of the run", file_okay=False)
    ] = None,
) -> None:
    """Show pass@n and pass@top-m against latency, and write metrics.json, curve.csv, pictures and report.html.

    All n follow exactly from one pool of samples per task. Accuracy and latency come from runs of their own, and are
    joined by n. Intervals are bootstrap intervals over tasks.

    Examples:

        hf-fastdecode eval report runs/mbpp --n 1,8,64 --format markdown
    """
    ns = None if n is None else parse_counts("n", n)
    write_and_show(folder, out or folder, reporting, ns=ns, rank=rank, seed=seed)


def write_and_show(
    folder: Path, out: Path, options: ReportOptions, *, ns: list[int] | None = None, rank: bool = True, seed: int = 0
) -> None:
    """Write the report of a run and show its tables."""
    from ...evals.report import report as build
    from ...evals.report_files import report_text, write_report

    found = build(folder, m=options.top_m if rank else None, ks=ns, seed=seed, deduplicate=options.check())
    files = write_report(found, out)
    show_tables(report_text(found))
    note("written: " + ", ".join(str(path) for path in files))
