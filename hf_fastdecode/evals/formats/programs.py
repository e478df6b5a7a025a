"""Between whole programs, as some tools store them, and completions of a stem."""

from __future__ import annotations

import re

from ..prompts.parsing import parses
from ..records import Task


def continuation(task: Task, program: str) -> str:
    """The completion with which a task's stem does what a whole program does.

    Args:
        task: With or without a stem.
        program: Which begins with the stem, or defines the entry point anew.

    Raises:
        ValueError: It is a Java program that does not begin with the stem; no class can be defined twice.
    """
    for stem in (task.stem, task.stem.strip()):
        if program.startswith(stem):
            return program.removeprefix(stem)
    if task.language == "python":  # the stem's function stays, with its docstring alone, until it is defined anew
        return program if parses(task.stem) else f"    pass\n{program}"
    if task.language == "javascript":
        name = re.escape(task.entry_point)
        return "}\n" + re.sub(rf"^(?:const|let)(?=\s+{name}\b)", "var", program, flags=re.M)
    raise ValueError("a Java program must begin with the task's stem; give what follows the stem as 'completion'")
