"""The prompts of `hier`: solved examples that all problems share, then a problem."""

from __future__ import annotations

from typing import Final

from hf_fastdecode.errors import CommandError

from ...evals.prompts import prompt_format
from ...evals.records import Task
from ...evals.tasks import TaskSet

APPS: Final = "apps"


def problem_prompts(tasks: TaskSet, shots: int) -> list[str]:
    """A prompt for each problem: MBPP's few-shot one (Austin et al. 2021), for APPS its own (Hendrycks et al. 2021).

    APPS has no tasks set apart as examples: its first problems with a solution are, and problems with starter code are
    left out, as in Hydragen, appendix D.4.

    Args:
        tasks: With their solved examples.
        shots: Solved examples.

    Raises:
        CommandError: There are not so many examples, no problem is left, or the tasks are not of MBPP's form.
    """
    if tasks.name != APPS:
        form = prompt_format(tasks, "austin", shots=shots)
        return [form.prompt(task) for task in tasks.tasks]
    plain = [task for task in tasks.tasks if not task.setup]
    examples = [task for task in plain if task.reference][:shots]
    problems = [task for task in plain if task not in examples]
    if len(examples) < shots or not problems:
        raise CommandError(
            f"{tasks.origin} has {len(plain)} problems without starter code, too few for {shots} solved examples and "
            "a problem; name a larger --data or lower --shots"
        )
    shown = "".join(f"{_asked(task)}{(task.reference or '').strip()}\n\n" for task in examples)
    return [shown + _asked(task) for task in problems]


def _asked(task: Task) -> str:
    return f"QUESTION:\n{task.description.strip()}\n\nUse Standard Input format\n\nANSWER:\n"
