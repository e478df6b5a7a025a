"""``eval run``: draw, time, score and report."""

from __future__ import annotations

from typing import Annotated

import typer

from ...evals.settings import VERDICTS
from ..console import note, quiet_libraries
from .check import check_references
from .generate import draw_samples, launched_shard
from .latency import time_samples
from .option_groups import expand_option_groups
from .options import (
    DecodingOptions,
    DrawOptions,
    ModelOptions,
    Out,
    PromptOptions,
    ReportOptions,
    SandboxOptions,
    TaskOptions,
    run_folder,
)
from .report import write_and_show
from .score import judge_samples
from .setup import Options, load_suitable_tasks, prepare


@expand_option_groups
def run(
    tasks: TaskOptions,
    model: ModelOptions,
    prompts: PromptOptions,
    draw: DrawOptions,
    decoding: DecodingOptions,
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
    reporting.check()
    options = Options(tasks, model, prompts, draw, decoding)
    chosen = load_suitable_tasks(options)
    place = sandbox.make(chosen.tasks)
    shard = launched_shard(model.device)
    folder = run_folder(out, tasks.task, model.model)
    if shard.number == 1:
        verdicts = check_references(chosen.tasks, place, sandbox)
        if failing := [verdict for verdict in verdicts if not verdict.passed]:
            note(
                f"{len(failing)} of {len(verdicts)} reference solutions fail here, first that of task "
                f"{failing[0].task_id} ({failing[0].status}: {failing[0].detail}); `hf-fastdecode eval check` lists "
                "them"
            )
    with quiet_libraries(warnings=True):
        prepared = prepare(options, chosen)
        draw_samples(prepared, folder, shard)
        if shard.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
        if shard.number > 1:
            return
        if latency:
            time_samples(prepared, folder, latency, [decoding.mode])
    from ...evals.generation.samples_file import merged_samples

    samples = merged_samples(folder, [task.task_id for task in chosen.tasks], prepared.counts[-1])
    judge_samples(chosen.tasks, samples, folder / VERDICTS, place, sandbox)
    write_and_show(folder, folder, reporting)
