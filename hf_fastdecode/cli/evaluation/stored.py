"""Stored samples with their tasks: of a run's folder, or of a file from here or another tool."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Final

from ...errors import CommandError
from ...evals.records import Sample
from ...evals.settings import read_settings
from ...evals.tasks import TaskSet
from ..console import note
from .options import PromptOptions, TaskOptions

# In the provenance of a run: the options that select its tasks, a hash of the tasks, and how they become prompts.
TASKS: Final = "tasks"
TASKS_DIGEST: Final = "tasks_digest"
PROMPTS: Final = "prompt_options"


def stored_samples(path: Path, options: TaskOptions) -> tuple[TaskSet, list[Sample]]:
    """Tasks and samples of a run's folder, which knows its tasks, or of a file.

    Args:
        path: Of the folder or file.
        options: Which tasks a file is about; without a split all of them. Samples of others are left out.

    Raises:
        CommandError: The samples or tasks cannot be read, do not go together, or are given twice.
    """
    return _of_run(path, options) if path.is_dir() else _of_file(path, options)


def prompt_options(path: Path, given: PromptOptions) -> PromptOptions:
    """How the tasks of stored samples were put to the model: a run's folder knows, for a file the options say.

    Raises:
        CommandError: A folder does not say, or options are given for it.
    """
    if not path.is_dir():
        return given
    if given != PromptOptions():
        raise CommandError(f"{path} knows its prompts; leave out --format, --shots and --chat")
    try:
        return PromptOptions(**read_settings(path)["provenance"][PROMPTS])
    except (KeyError, TypeError) as error:
        raise CommandError(f"{path} does not say which prompts its samples follow; name the file in it") from error


def _of_file(path: Path, options: TaskOptions) -> tuple[TaskSet, list[Sample]]:
    from ...evals.formats import import_samples

    chosen = replace(options, split=options.split or "all").load()
    every = replace(options, split="all", limit=None, task_ids=None).load(silent=True)  # chosen's note is theirs
    return chosen, import_samples(path, every.tasks, chosen.tasks)


def _of_run(folder: Path, options: TaskOptions) -> tuple[TaskSet, list[Sample]]:
    from ...evals.generation.samples_file import merged_samples

    settings = read_settings(folder)
    if options != TaskOptions():
        raise CommandError(f"{folder} knows its tasks; leave out --task, --data, --split, --limit and --task-ids")
    try:
        selected, digest = TaskOptions.from_json(settings["provenance"][TASKS]), settings["provenance"][TASKS_DIGEST]
    except (KeyError, TypeError) as error:
        raise CommandError(f"{folder} does not say which tasks its samples are of; name the file in it") from error
    tasks = selected.load()
    if tasks.digest != digest:
        raise CommandError(
            f"the tasks in {tasks.origin} are no longer those that {folder} has samples of; put the old ones back, or "
            "draw samples anew into another folder"
        )
    samples = merged_samples(folder, [task.task_id for task in tasks.tasks], settings["n"])
    if len(samples) < (planned := settings["n"] * len(tasks.tasks)):
        note(f"{folder} holds {len(samples):,} of {planned:,} samples; the others are not drawn yet")
    return tasks, samples
