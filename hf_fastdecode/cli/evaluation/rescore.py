"""``eval rescore``: log-probabilities of stored samples by teacher forcing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import note, quiet_libraries
from .option_groups import expand_option_groups
from .options import ModelOptions, PromptOptions, TaskOptions
from .stored import prompt_options, stored_samples


@expand_option_groups
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

    The model may be another one than drew them. A run's folder knows its prompts. Run the same command again after an
    interruption, and it goes on.
    """
    from ...evals.generation.rescore import rescore_samples
    from ..devices import pick_device
    from ..models import load_model

    model.check()
    chosen, given = stored_samples(samples, tasks)
    prompts = prompt_options(samples, prompts)
    with quiet_libraries(warnings=True):
        loaded, tokenizer = load_model(model.model, model.dtype, pick_device(model.device))
        rescore_samples(loaded, tokenizer, prompts.make(chosen, tokenizer), chosen.tasks, given, out)
    note(f"{len(given):,} samples with log-probabilities in {out}")
