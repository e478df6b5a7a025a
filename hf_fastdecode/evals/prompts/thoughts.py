"""Answers of chat models that think first: where thoughts end, and the program of the answer behind them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from hf_fastdecode.errors import InputError

from ..records import Task
from .function_ends import BraceEnd
from .stop_rules import StopRule, longest_parsing_prefix, parses


@dataclass(frozen=True)
class Thoughts:
    """How a model marks its thoughts."""

    opening: str
    closing: str  # the answer is what follows it
    opened: bool = False  # by the prompt: the text begins inside


CHANNELS: Final = Thoughts("<|channel|>", "<|channel|>final<|message|>")
"""Of gpt-oss (harmony): the model names a channel for each message, and that of the answer is ``final``."""

_KNOWN: Final = (
    CHANNELS,
    Thoughts("<think>", "</think>"),  # DeepSeek-R1, Qwen3, GLM-4.5, MiniMax-M2 and most others
    Thoughts("<thinking>", "</thinking>"),
    Thoughts("<thought>", "</thought>"),  # EXAONE Deep
    Thoughts("<seed:think>", "</seed:think>"),  # Seed-OSS
    Thoughts("[THINK]", "[/THINK]"),  # Magistral
    Thoughts("<|START_THINKING|>", "<|END_THINKING|>"),  # Command A Reasoning
    Thoughts("<|channel>thought", "<channel|>"),  # Gemma 4
    Thoughts("\u25c1think\u25b7", "\u25c1/think\u25b7"),  # Kimi
)


def thoughts_of(template: str, prompt: str) -> Thoughts | None:
    """How a model thinks, from its chat template and the part of a prompt behind the user's message.

    None where it does not, or where the prompt has closed its thoughts, as with ``enable_thinking=False``.
    """
    if prompt.rstrip().endswith("<|start|>assistant"):
        return CHANNELS
    for known in _KNOWN:
        if known.closing in prompt:
            return None
        if known.opening in prompt:
            return Thoughts(known.opening, known.closing, opened=True)
    return next((known for known in _KNOWN if known.opening in template or known.closing in template), None)


class ThoughtfulAnswer(StopRule):
    """Ends behind the first code block after the thoughts, or where no block was begun, with the text.

    To a prompt without tests, all behind the thoughts is the answer.
    """

    def __init__(self, task: Task, thoughts: Thoughts):
        super().__init__()
        self._task, self._thoughts = task, thoughts

    def answer_start(self, text: str) -> int | None:
        """Where the answer begins, as a number of characters; None while the model thinks."""
        end = text.find(self._thoughts.closing)
        if end >= 0:
            return end + len(self._thoughts.closing)
        begun, opening = text.lstrip(), self._thoughts.opening
        may_think = self._thoughts.opened or begun.startswith(opening) or opening.startswith(begun)
        return None if may_think else 0

    def completion(self, text: str) -> str:
        start = self.answer_start(text)
        if start is not None and not self._task.tests:
            return text[start:]
        block = None if start is None else _BLOCK.search(text[start:])
        if block is None:
            return ""  # cut off, or an answer without a program
        program = block["program"]
        if self._task.language == "python" and not block["end"]:
            program = longest_parsing_prefix(program)
        try:
            return continued(self._task, program)
        except InputError:  # the method is not there, which the compiler says too
            return program

    def _restart(self) -> None:
        pass

    def _find(self, text: str) -> int | None:
        start = self.answer_start(text) if self._task.tests else None
        block = None if start is None else _BLOCK.search(text[start:])
        return start + block.end() if start is not None and block and block["end"] else None


_BLOCK: Final = re.compile(r"^[ \t]*```[^\n`]*\n(?P<program>.*?)(?P<end>^[ \t]*```|\Z)", re.M | re.S)


def continued(task: Task, program: str) -> str:
    """The completion with which a task's stem does what a whole program does.

    The program begins with the stem, or defines the entry point again. An InputError where it is Java that has no
    method of that name.
    """
    for stem in (task.stem, task.stem.strip()):
        if program.startswith(stem):
            return program.removeprefix(stem)
    if task.language == "python":  # the stem's function stays, with its docstring alone, until it is defined anew
        return program if parses(task.stem) else f"    pass\n{program}"
    if task.language == "javascript":
        name = re.escape(task.entry_point)
        return "}\n" + re.sub(rf"^(?:const|let)(?=\s+{name}\b)", "var", program, flags=re.M)
    # In Java no class can be defined twice: the body continues the stem's method.
    if head := re.search(rf"\b{re.escape(task.entry_point)}\s*\([^)]*\)[^;{{]*\{{", program):
        return BraceEnd(task.language, task.stem, task.entry_point).completion(program[head.end() :])
    raise InputError(f"a Java program must begin with the task's stem, or have its method {task.entry_point}")


def template_of(tokenizer: Any) -> str:
    """The text of a tokenizer's chat template; of several, all of them."""
    found = tokenizer.chat_template
    return "\n".join(map(str, found.values())) if isinstance(found, dict) else str(found)
