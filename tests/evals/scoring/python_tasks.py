"""Tasks of Python whose tests are asserts, and programs checked against them."""

from __future__ import annotations

from contextlib import ExitStack
from functools import cache

from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox
from hf_fastdecode.evals.scoring import Result
from hf_fastdecode.evals.scoring.python import PythonRunner

LIMITS = Limits(cpu_seconds=1, wall_seconds=5, memory_bytes=256 << 20, address_bytes=1 << 30, output_bytes=1 << 20)


def asserts(*tests: str, setup: str = "", entry_point: str = "", stem: str = "") -> Task:
    """A task of asserts."""
    return Task("1", "python", "", stem, tests, entry_point, setup)


def check(sandbox: Sandbox, task: Task, program: str) -> Result:
    return _runner(sandbox).check(task, program)


_RUNNERS = ExitStack()


@cache
def _runner(sandbox: Sandbox) -> PythonRunner:
    """One for all tests, as a run has one for all tasks: each check has new sandboxes, forked from what it keeps."""
    return _RUNNERS.enter_context(PythonRunner(sandbox, LIMITS))


def end_runners() -> None:
    """End what `check` keeps."""
    _runner.cache_clear()
    _RUNNERS.close()
