"""``eval rescore``: log-probabilities of stored samples by teacher forcing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import note, quiet_libraries
from .option_groups import with_groups
from .options import ModelOptions, PromptOptions, TaskOptions
from .stored import stored_samples


@with_groups
def rescore(
    samples: Annotated[
        Path,
        typer.Argument(
            help="A run's folder; or a file of samples from here or another tool, with its --task.", exists=True
        ),
    ],
    out: Annotated[Path, typer.Option(help="File of samples to write, with log-probabilities.", dir_okay=False)],
    tasks: TaskOptions,
    model: ModelOptions,
    prompts: PromptOptions,
) -> None:
    """Give stored samples a model's log-probabilities, by one pass over each (teacher forcing).

    The model may be another one than drew them. The file is written when all are done.
    """
    from tqdm import tqdm

    from ...devices import pick_device
    from ...evals.formats import export_samples
    from ...evals.generation.rescore import rescored
    from ..models import load_model

    model.check()
    chosen, given = stored_samples(samples, tasks)
    with quiet_libraries(warnings=True):
        loaded, tokenizer = load_model(model.model, model.dtype, pick_device(model.device))
        form = prompts.make(chosen, tokenizer)
        found = []
        for task in tqdm(chosen.tasks, desc="rescore", unit="task", disable=None):
            own = [sample for sample in given if sample.task_id == task.task_id]
            found += rescored(loaded, tokenizer, form, task, own)
    export_samples(out, found, chosen.tasks)
    note(f"{len(found):,} samples with log-probabilities in {out}")
