"""The format `mbxp`: the model continues a task's signature and docstring (Athiwaratkun et al. 2022, section 4)."""

from __future__ import annotations

from hf_fastdecode.errors import CommandError

from ..records import Task
from .brace_end import BraceEnd
from .format import PromptFormat
from .python_end import PythonFunctionEnd
from .stop_rules import StopRule


def stem_format() -> PromptFormat:
    """The stem itself as the prompt; the completion ends with the function."""
    return PromptFormat("mbxp", _stem, function_end)


def function_end(task: Task) -> StopRule:
    """The rule that ends a completion with the function that the task's stem begins."""
    if task.language == "python":
        return PythonFunctionEnd(_stem(task), task.entry_point)
    return BraceEnd(task.language, _stem(task), task.entry_point)


def _stem(task: Task) -> str:
    if not task.stem:
        raise CommandError(
            f"task {task.task_id} has no signature that a completion could continue, which the prompt format mbxp "
            'needs; use `prompt_format="austin"` or `prompt_format="bigcode"`'
        )
    return task.stem
