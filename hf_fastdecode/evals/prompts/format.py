"""A prompt format: what a model reads of a task, and what of its text is the completion."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..records import Task
from .stop_rules import StopRule


@dataclass(frozen=True)
class PromptFormat:
    """How a set of tasks is put to a model.

    Attributes:
        name: As on the command line.
        prompt: The prompt of a task.
        stop_rule: A new stop rule for one completion of a task. It also cuts the completion out of a text.
        shared: What all prompts begin with; empty where they share nothing.
        special_tokens: Whether the tokenizer is to add its special tokens; a chat template has written them.
    """

    name: str
    prompt: Callable[[Task], str]
    stop_rule: Callable[[Task], StopRule]
    shared: str = ""
    special_tokens: bool = True
