"""A programming task: what every source of tasks yields and every scorer takes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Language = Literal["python", "java", "javascript"]


@dataclass(frozen=True)
class Task:
    """A programming task with tests.

    Attributes:
        task_id: As published, e.g. ``"11"`` (MBPP), ``"MBJP/3"`` (MBXP), ``"HumanEval/0"``.
        language: Of the program.
        description: The task in English.
        stem: Code that a completion continues, such as a signature and a docstring; empty where the completion is a
            whole program (MBPP).
        tests: Test code: asserts (MBPP), or one program that checks the entry point (MBXP, HumanEval).
        entry_point: Name of the function under test; empty where the task does not name it.
        setup: Code that runs before the tests: imports, test data.
        reference: A completion that passes the tests, if one is published.
    """

    task_id: str
    language: Language
    description: str
    stem: str
    tests: tuple[str, ...]
    entry_point: str = ""
    setup: str = ""
    reference: str | None = None

    def program(self, completion: str) -> str:
        """The program that a completion makes."""
        return self.stem + completion
