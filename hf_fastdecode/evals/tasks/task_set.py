"""A set of tasks with where it comes from."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Final

from hf_fastdecode.errors import CommandError

from ..records import Language, Task

_ID: Final = re.compile(r"(?:([A-Za-z]\w*?)[/_])?(\d+)")
_MBPP: Final = "mbpp"  # tools write MBPP's ids as 11, Mbpp/11 and MBPP/11


@dataclass(frozen=True)
class TaskSet:
    """Tasks of one source.

    Attributes:
        name: Of the source, such as ``mbpp``.
        origin: Where the tasks were read.
        tasks: Those asked for, in the source's order; at least one.
        examples: Solved tasks for few-shot prompts, none of them among those asked for by default.
        note: A line for people where the data is not the published one, else empty.
    """

    name: str
    origin: str
    tasks: tuple[Task, ...]
    examples: tuple[Task, ...] = ()
    note: str = ""

    @property
    def language(self) -> Language:
        """Of all the tasks."""
        return self.tasks[0].language

    @cached_property
    def digest(self) -> str:
        """A hash of the tasks and examples: equal for the same tasks wherever they were read."""
        content = [[asdict(task) for task in tasks] for tasks in (self.tasks, self.examples)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


class TaskIds:
    """Finds tasks by the ids that people and other tools give them: ``11``, ``"11"``, ``"Mbpp/11"``, ``"MBJP/11"``.

    Args:
        tasks: With different ids.
    """

    def __init__(self, tasks: Iterable[Task]):
        self._tasks = {_key(task.task_id): task for task in tasks}
        self._prefixes = {prefix for prefix, _ in self._tasks}

    def find(self, given: object) -> Task | None:
        """The task with an id; None if there is none.

        Args:
            given: An integer, or a text with or without the data set's name.
        """
        if isinstance(given, bool) or not isinstance(given, (int, str)):
            return None
        prefix, number = _key(str(given).strip())
        prefixes = {"": self._prefixes, _MBPP: {_MBPP, ""}}.get(prefix, {prefix})
        found = [self._tasks[one, number] for one in prefixes if (one, number) in self._tasks]
        return found[0] if len(found) == 1 else None

    def require(self, given: object, place: str = "") -> Task:
        """The task with an id.

        Raises:
            CommandError: There is none.
        """
        if task := self.find(given):
            return task
        known = [task.task_id for task in self._tasks.values()]
        raise CommandError(
            f"{place}there is no task {given}; the {len(known)} tasks have ids from {known[0]} to {known[-1]}"
        )


def _key(task_id: str) -> tuple[str, str]:
    """Data set's name in lower case, and number; an id of another form is its own name."""
    match = _ID.fullmatch(task_id)
    return (task_id, "") if match is None else ((match[1] or "").lower(), str(int(match[2])))
