"""The prompt format of the embedded model: MBPP's few-shot prompt (Austin et al. 2021, section 3.1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

Task = dict[str, Any]

BEGIN: Final = "[BEGIN]"  # one token of the embedded tokenizer
DONE: Final = "[DONE]"  # the embedded tokenizer's eos token
SEPARATOR: Final = "\n\n"  # between the examples of a prompt


def task_prompt(text: str, tests: Sequence[str]) -> str:
    """A task up to the point where the completion starts."""
    return (
        f"You are an expert Python programmer, and here is your task: {text} "
        "Your code should pass these tests:\n\n" + "\n".join(tests) + f"\n{BEGIN}\n"
    )


def solved_example(text: str, tests: Sequence[str], code: str) -> str:
    """A task followed by its solution, as it stands in a few-shot prompt and in training."""
    return f"{task_prompt(text, tests)}{code}\n{DONE}"
