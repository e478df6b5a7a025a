"""The format `bigcode`: the zero-shot prompts of bigcode-evaluation-harness, with its stop words.

A completion is cut at the first stop word and is not repaired, as there, so that the verdicts can be compared.
"""

from __future__ import annotations

from typing import Final

from hf_fastdecode.errors import CommandError

from ..records import Task
from .format import PromptFormat
from .stop_rules import StopWords

# bigcode_eval/tasks/mbpp.py and bigcode_eval/tasks/humaneval.py
_MBPP_STOP_WORDS: Final = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n<|/", "\n```")
_HUMANEVAL_STOP_WORDS: Final = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```", "<file_sep>")


def docstring_format() -> PromptFormat:
    """A docstring with the description and the first test, or the stem without the white space around it."""
    return PromptFormat(
        "bigcode", _prompt, lambda task: StopWords(_HUMANEVAL_STOP_WORDS if task.stem else _MBPP_STOP_WORDS)
    )


def _prompt(task: Task) -> str:
    if task.language != "python":
        raise CommandError(
            f'the prompt format bigcode is for Python, got a task in {task.language}; use `prompt_format="mbxp"`'
        )
    if task.stem:
        return task.stem.strip()
    return f'"""\n{task.description}\n{task.tests[0]}\n"""\n'
