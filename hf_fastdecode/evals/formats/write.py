"""Writing samples for other tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Literal, get_args

from hf_fastdecode.errors import CommandError

from ...files import json_lines, write_text
from ..records import Sample, Task

Form = Literal["own", "human-eval", "mxeval", "evalplus", "bigcode"]
FORMS: Final[tuple[str, ...]] = get_args(Form)


def export_samples(path: Path, samples: Sequence[Sample], tasks: Sequence[Task], form: Form = "own") -> None:
    """Write samples in the form that a tool reads.

    Args:
        path: Where to; what stands there is replaced once all is written.
        samples: Of these tasks.
        tasks: In the order in which `bigcode` is to find their samples.
        form: ``own`` with log-probabilities; ``human-eval`` and ``mxeval`` with completions; ``evalplus`` and
            ``bigcode`` with whole programs.

    Raises:
        CommandError: A sample has no task, or a task no sample where position tells the task.
    """
    by_id = {task.task_id: task for task in tasks}
    if strange := [sample.task_id for sample in samples if sample.task_id not in by_id]:
        raise CommandError(
            f"there is no task {strange[0]} for its samples; name the task set that they were made from"
        )
    if form == "bigcode":
        text = json.dumps(_in_task_order(samples, tasks))
    else:
        text = json_lines((_fields(sample, by_id[sample.task_id], form) for sample in samples), ascii_only=True)
    write_text(path, text)


def _fields(sample: Sample, task: Task, form: Form) -> dict[str, Any]:
    if form == "own":
        return asdict(sample)
    if form == "evalplus":
        plain = task.task_id.isdecimal()  # of MBPP
        return {
            "task_id": f"Mbpp/{task.task_id}" if plain else task.task_id,
            "solution": task.program(sample.completion),
        }
    language = {"language": task.language} if form == "mxeval" else {}
    return {"task_id": task.task_id, "completion": sample.completion, **language}


def _in_task_order(samples: Sequence[Sample], tasks: Sequence[Task]) -> list[list[str]]:
    programs: dict[str, list[str]] = {task.task_id: [] for task in tasks}
    by_id = {task.task_id: task for task in tasks}
    for sample in sorted(samples, key=lambda one: one.index):
        programs[sample.task_id].append(by_id[sample.task_id].program(sample.completion))
    if empty := [task_id for task_id, found in programs.items() if not found]:
        raise CommandError(
            f"task {empty[0]} has no sample, and bigcode's form tells tasks by position; pass fewer tasks"
        )
    return list(programs.values())
