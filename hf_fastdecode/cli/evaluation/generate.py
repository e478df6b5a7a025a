"""``eval generate``: draw samples."""

from __future__ import annotations

import os
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Final

import typer

from ...errors import forced_options
from ...evals.generation.samples_file import WHOLE, Shard
from ...evals.settings import RunSettings, prompts_digest
from ..console import note, quiet_libraries
from .option_groups import expand_option_groups
from .options import DecodingOptions, DrawOptions, ModelOptions, Out, PromptOptions, TaskOptions, run_folder
from .setup import Options, Prepared, load_suitable_tasks, prepare
from .stored import PROMPTS, TASKS, TASKS_DIGEST

_WAITING: Final = timedelta(weeks=1)
"""How long processes of a launch wait for the slowest; torch's own limit is ten minutes."""


@expand_option_groups
def generate(
    tasks: TaskOptions,
    model: ModelOptions,
    prompts: PromptOptions,
    draw: DrawOptions,
    decoding: DecodingOptions,
    shard: Annotated[
        str | None,
        typer.Option(
            help="i/N: draw only the i-th of N parts of the run, as one of N processes that share the folder. "
            "`accelerate launch` does this by itself."
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Draw samples of every task into a run's folder, each with the model's raw log-probabilities.

    A row leaves the batch once its completion is over. Each `generate` call is on the disk before the next begins: run
    the same command again after an interruption, and it draws what is missing, the same as without one.

    Examples:

        hf-fastdecode eval generate --limit 20 --n 8
        hf-fastdecode eval generate --model MODEL --task mbpp --n 64 --out runs/mbpp
        accelerate launch -m hf_fastdecode eval generate --model MODEL --task humaneval
    """
    part = launched_shard(model.device) if shard is None else Shard.parse(shard)
    folder = run_folder(out, tasks.task, model.model)
    options = Options(tasks, model, prompts, draw, decoding)
    chosen = load_suitable_tasks(options)
    with quiet_libraries(warnings=True):
        draw_samples(prepare(options, chosen), folder, part)


def launched_shard(device: str) -> Shard:
    """The part of this process among those of `accelerate launch` or another launcher.

    Args:
        device: As of `ModelOptions`: accelerate must be told where there are no GPUs to count processes by.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        return WHOLE
    import torch
    from accelerate import PartialState

    state = PartialState(cpu=device == "cpu" or not torch.cuda.is_available(), timeout=_WAITING)
    return Shard(state.process_index + 1, state.num_processes)


def draw_samples(prepared: Prepared, folder: Path, shard: Shard) -> None:
    """Draw what the folder lacks, with a bar, and say what was done."""
    from ...evals.generation.run import generate_samples
    from ...evals.generation.weights import model_digest
    from ...measurement.rows import provenance

    tasks, model, options = prepared.tasks, prepared.model, prepared.options
    settings = RunSettings(
        model=options.model.model,
        weights=model_digest(model, prepared.tokenizer),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        task=tasks.name,
        prompts=prompts_digest([task.task_id for task in tasks.tasks], prepared.prompts),
        format=prepared.form.name,
        n=prepared.counts[-1],
        seed=options.draw.seed,
        rows=options.decoding.rows,
        drawing=prepared.drawing,
    )
    with forced_options():
        drawn = generate_samples(
            model,
            prepared.tokenizer,
            tasks.tasks,
            prepared.form,
            settings,
            folder,
            shard=shard,
            provenance=provenance(model.device)
            | {TASKS: options.tasks.to_json(), TASKS_DIGEST: tasks.digest, PROMPTS: asdict(options.prompts)},
        )
    note(f"{drawn:,} samples drawn into {folder / shard.file_name}")
