"""``eval run``: draw, time, score and report."""

from __future__ import annotations

from typing import Annotated

import typer

from ...evals.run_files import VERDICTS
from ..console import note, quiet_libraries
from .check import check_references
from .generate import draw_samples, launched_shard
from .latency import time_samples
from .option_groups import with_groups
from .options import (
    DrawOptions,
    ModelOptions,
    Out,
    PromptOptions,
    ReportOptions,
    SandboxOptions,
    TaskOptions,
    WayOptions,
    run_folder,
)
from .report import write_and_show
from .score import judge_samples
from .setup import prepare


@with_groups
def run(
    tasks: TaskOptions,
    model: ModelOptions,
    prompts: PromptOptions,
    draw: DrawOptions,
    way: WayOptions,
    sandbox: SandboxOptions,
    reporting: ReportOptions,
    latency: Annotated[
        int, typer.Option(help="Prompts that are timed for each n, the first ones; 0 times nothing.", min=0)
    ] = 3,
    out: Out = None,
) -> None:
    """Draw samples, time drawing, score in a sandbox, and report pass@n and pass@top-m against latency.

    Without arguments: the embedded model on the embedded tasks, offline. Everything goes into a folder, from which the
    same command goes on after an interruption. The steps are commands of their own: generate, latency, score, report.

    Examples:

        hf-fastdecode eval run
        hf-fastdecode eval run --limit 20 --n 1,8 --latency 1
        hf-fastdecode eval run --model MODEL --task mbpp --n 1,4,16,64 --out runs/mbpp
    """
    draw.check()
    way.check()
    model.check()
    reporting.check()
    shard = launched_shard()
    folder = run_folder(out, tasks.task, model.model)
    chosen = tasks.load().tasks
    place = sandbox.make(chosen)
    if shard.number == 1:
        failing = [verdict for verdict in check_references(chosen, place, sandbox.workers) if not verdict.passed]
        if failing:
            note(
                f"{len(failing)} of {len(chosen)} reference solutions fail here, first that of task "
                f"{failing[0].task_id} ({failing[0].status}: {failing[0].detail}); `hf-fastdecode eval check` lists "
                "them"
            )
    with quiet_libraries(warnings=True):
        prepared = prepare(tasks, model, prompts, draw, way)
        draw_samples(prepared, folder, shard)
        if shard.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
        if shard.number > 1:
            return
        if latency:
            time_samples(prepared, folder, latency, [way.mode])
    from ...evals.generation.samples_file import merged_samples

    samples = merged_samples(folder, [one.task_id for one in chosen], prepared.counts[-1])
    judge_samples(chosen, samples, folder / VERDICTS, place, sandbox.workers)
    write_and_show(folder, folder, reporting)
