"""Checking JavaScript programs by node: each program in a sandbox of its own, and the tests in another.

`lodash.isequal` is lodash's `_.isEqual` as published on npm, with which MBXP's tests compare values.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Final

from ...records import Task
from ...sandbox import Limits
from ..pairs import PairRunner, Role
from ..runner import LanguageSupport, Result, command_version, require_tests

_FOLDER: Final = Path(__file__).resolve().parent
_SCRIPTS: Final = {"server": "judge.js", "candidate": "candidate.js"}
_HEAP_MIB: Final = 512
# Messages go over descriptors of their own; standard input is empty, and what is printed is dropped with the errors.
_MOVE_STREAMS: Final = 'exec "$@" 3<&0 4>&1 0</dev/null 1>&2'


class JavaScriptRunner(PairRunner):
    """Checks programs as CommonJS modules, each in a new process."""

    def _check(self, task: Task, completion: str) -> Result:
        """Of a task with tests that names a function; another raises ValueError."""
        _check_task(task)
        return self._tested([task.program(completion), task.entry_point], ["\n".join(task.tests), task.entry_point])

    def _launch(self, role: Role) -> tuple[list[str], list[Path]]:
        node = Path(shutil.which("node") or "").resolve()
        command = [str(node), f"--max-old-space-size={_HEAP_MIB}", str(_FOLDER / _SCRIPTS[role])]
        return ["/bin/sh", "-c", _MOVE_STREAMS, "sh", *command], [node, _FOLDER]


def _missing() -> str | None:
    return None if shutil.which("node") else "JavaScript programs need node; install it (apt install nodejs)"


def _check_task(task: Task) -> None:
    require_tests(task)
    if not task.entry_point.isidentifier():
        raise ValueError(f"task {task.task_id} must name the function under test, got {task.entry_point!r}")
    if not any(task.entry_point in test for test in task.tests):
        raise ValueError(f"the tests of task {task.task_id} never call {task.entry_point}; every program would pass")


JAVASCRIPT: Final = LanguageSupport(
    JavaScriptRunner, Limits(), _missing, _check_task, partial(command_version, "node")
)
