"""Tasks of Python whose tests are asserts, and programs checked against them."""

from __future__ import annotations

from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox
from hf_fastdecode.evals.scoring import Result
from hf_fastdecode.evals.scoring.python import PythonRunner

LIMITS = Limits(cpu_seconds=1, wall_seconds=5, memory_bytes=256 << 20, address_bytes=1 << 30, output_bytes=1 << 20)


def asserts(*tests: str, setup: str = "", entry_point: str = "", stem: str = "") -> Task:
    """A task of asserts."""
    return Task("1", "python", "", stem, tests, entry_point, setup)


def check(sandbox: Sandbox, task: Task, program: str) -> Result:
    with PythonRunner(sandbox, LIMITS) as runner:
        return runner.check(task, program)
