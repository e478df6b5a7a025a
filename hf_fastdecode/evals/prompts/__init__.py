"""Prompt formats: prompts, stop rules and truncation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from hf_fastdecode.errors import InputError

from ..tasks import TaskSet
from .formats import PromptFormat, chat_format, docstring_format, few_shot_format, plain_format, stem_format
from .stop_rules import StopRule

__all__ = ["FORMAT_NAMES", "SHOTS", "PromptFormat", "StopRule", "prompt_format"]

FORMAT_NAMES: Final = ("mbxp", "austin", "bigcode", "plain")
SHOTS: Final = 3
"""Solved examples of the format `austin`, as in its paper."""


def prompt_format(
    tasks: TaskSet,
    name: str | None = None,
    *,
    shots: int = SHOTS,
    chat_tokenizer: Any = None,
    template_arguments: Mapping[str, Any] | None = None,
) -> PromptFormat:
    """The format in which tasks are put to a model; an InputError where it does not suit them.

    Without a name, `plain` for prompts without tests, `mbxp` where tasks begin with a signature, else `austin`, with
    `shots` of the tasks' solved examples. The template of a chat model's tokenizer, with its arguments, takes the
    place of a named format.
    """
    if chat_tokenizer is not None:
        if name is not None:
            raise InputError(f'`chat` and `prompt_format="{name}"` were both given; leave one out')
        return chat_format(chat_tokenizer, template_arguments or {})
    first = tasks.tasks[0]
    chosen = name or ("plain" if not first.tests else "mbxp" if first.stem else "austin")
    if chosen == "plain":
        found = plain_format()
    elif chosen == "mbxp":
        found = stem_format()
    elif chosen == "austin":
        found = few_shot_format(tasks.examples, shots)
    elif chosen == "bigcode":
        found = docstring_format()
    else:
        raise InputError(f"there is no prompt format {chosen!r}; choose one of {', '.join(FORMAT_NAMES)}")
    found.prompt(first)  # a format that does not suit the tasks says so now
    return found
