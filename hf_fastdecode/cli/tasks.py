"""The embedded tasks that a command is given by their ids."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_fastdecode.assets import Task, embedded_tasks, fewshot_tasks

from ..errors import CommandError

DEFAULT_TASK: Final = 127
"""A task that some samples solve and others do not, so that ranking them has a point."""

SHOTS: Final = 9
"""Solved examples before a task, unless told otherwise."""


def pick_tasks(ids: Sequence[int], shots: int) -> list[Task]:
    """The embedded tasks with these ids; checks the number of shots too.

    Raises:
        CommandError: There is no such task, or there are not so many solved examples.
    """
    most = len(fewshot_tasks())
    if not 0 <= shots <= most:
        raise CommandError(f"--shots must be between 0 and {most}, the number of solved examples, got {shots}")
    tasks = {task["task_id"]: task for task in embedded_tasks()}
    if unknown := [one for one in ids if one not in tasks]:
        raise CommandError(
            f"there is no task {unknown[0]}; the embedded tasks have ids from {min(tasks)} to {max(tasks)}"
        )
    return [tasks[one] for one in ids]
