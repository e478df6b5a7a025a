"""The format `austin`: MBPP's few-shot prompt (Austin et al. 2021, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hf_fastdecode.assets.prompt import DONE, SEPARATOR, solved_example, task_prompt
from hf_fastdecode.errors import CommandError

from ..records import Task
from .format import PromptFormat
from .stop_rules import StopWords

_MARK: Final = "\0"


def few_shot_format(examples: Sequence[Task], shots: int) -> PromptFormat:
    """Solved examples, then the task up to ``[BEGIN]``; the completion ends at ``[DONE]``.

    Args:
        examples: Tasks with a reference, in the order in which a prompt shows them.
        shots: How many of them it shows.

    Raises:
        CommandError: There are not so many examples.
    """
    if not 0 <= shots <= len(examples):
        few = "; pass a file that also holds the tasks 1 to 10" if not examples else ""
        raise CommandError(f"`shots` must be between 0 and {len(examples)}, the solved examples, got {shots}{few}")
    shown = [solved_example(one.description, one.tests, one.reference or "") for one in examples[:shots]]
    before = task_prompt(_MARK, []).partition(_MARK)[0]
    return PromptFormat(
        "austin",
        lambda task: SEPARATOR.join([*shown, task_prompt(_described(task).description, task.tests)]),
        lambda task: StopWords([DONE], repaired=True),
        shared=SEPARATOR.join([*shown, before]),
    )


def _described(task: Task) -> Task:
    if task.stem or task.language != "python":
        raise CommandError(
            f"task {task.task_id} begins with a signature; the prompt format austin is for MBPP's description and "
            'asserts, use `prompt_format="mbxp"`'
        )
    return task
