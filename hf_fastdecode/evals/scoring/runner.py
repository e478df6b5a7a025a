"""What checks the completions of one language."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Protocol, Self

from ..records import Status, Task
from ..sandbox import LimitExceeded, Limits, Sandbox, SandboxError


@dataclass(frozen=True)
class Result:
    """The outcome of a completion's tests; status, detail and outputs as in `Verdict`."""

    status: Status
    detail: str = ""
    load: bool = False  # a busy machine may have caused it: it is tried once more, alone and with more time
    status_if_at_fault: Status | None = None  # of a sandbox_error, if the program can be the cause
    outputs: str = field(default="", compare=False)  # results are equal by their outcome

    @classmethod
    def exceeded(cls, error: LimitExceeded) -> Result:
        """Of a program that exceeded a limit."""
        return cls(error.status, error.detail, error.load)


class BrokenServerError(SandboxError):
    """The process of the tests ended or met a limit while it dealt with a program, which may be the cause; `result` is
    then the program's.
    """

    def __init__(self, result: Result):
        super().__init__(f"the tests' process broke down: {result.detail}")
        self.result = result


class Runner(Protocol):
    """Checks completions one after another, in the thread that made it. Its end ends the processes that it keeps."""

    def check(self, task: Task, completion: str) -> Result:
        """Run a completion and the task's tests.

        Raises:
            SandboxError: Something broke that says nothing about the completion; it is tried again.
            BrokenServerError: The completion may have caused it.
            ValueError: The task has no tests, or none that can be run.
        """

    def __enter__(self) -> Self: ...

    def __exit__(self, *raised: object) -> None: ...


@dataclass(frozen=True)
class LanguageSupport:
    """How programs of a language are checked."""

    runner: Callable[[Sandbox, Limits], Runner]
    limits: Limits  # by default
    missing: Callable[[], str | None] = lambda: None  # why programs cannot be checked here, with the remedy
    check_task: Callable[[Task], object] = lambda task: None  # a ValueError if its tests cannot run
    version: Callable[[], str] = lambda: ""  # of what runs programs; empty where that is missing

    def limits_of(self, cpu_seconds: float | None = None, wall_seconds: float | None = None) -> Limits:
        """Limits with other times where they are given; the wall-clock limit is at least three times the CPU time."""
        own = self.limits
        cpu = cpu_seconds or own.cpu_seconds
        wall = wall_seconds or max(own.wall_seconds, 3 * cpu)
        return replace(own, cpu_seconds=cpu, wall_seconds=wall)


def require_tests(task: Task) -> None:
    """Refuse a task without tests, or with empty ones only, with a ValueError."""
    if not any(test.strip() for test in task.tests):
        raise ValueError(f"task {task.task_id} has no tests; every program would pass")


@cache
def command_version(command: str) -> str:
    """The first line that a command says of its version; empty where it is missing or says nothing."""
    path = shutil.which(command)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.splitlines()), "").strip()
