"""Prompt formats: what a model reads of a task, and what of its text is the completion.

- ``mbxp``: the model continues a task's signature and docstring (Athiwaratkun et al. 2022, section 4).
- ``plain``: a prompt as it is; the completion is all that follows.
- ``austin``: MBPP's few-shot prompt (Austin et al. 2021, section 3.1).
- ``bigcode``: the zero-shot prompts of bigcode-evaluation-harness with its stop words. A completion is cut at the
  first stop word and not repaired, as there, so that verdicts can be compared.
- ``chat``: a user's message through the tokenizer's chat template. The code block of the answer is begun with the
  task's stem, if there is one, as EvalPlus does, so that the completion continues the stem and ends with the block. Of
  a prompt without tests, the completion is the whole answer.
- ``chat-thinking``: the same message to a model that thinks first. It answers in its own format; the program is the
  first code block behind its thoughts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from hf_fastdecode.assets.prompt import DONE, SEPARATOR, solved_example, task_prompt
from hf_fastdecode.errors import InputError

from ..records import Task
from .function_ends import BraceEnd, PythonFunctionEnd
from .stop_rules import StopRule, StopWords, Unbounded
from .thoughts import ThoughtfulAnswer, template_of, thoughts_of


@dataclass(frozen=True)
class PromptFormat:
    """How tasks are put to a model."""

    name: str  # as on the command line
    prompt: Callable[[Task], str]
    stop_rule: Callable[[Task], StopRule]  # a new one for each completion; it also cuts the completion out of a text
    special_tokens: bool = True  # of the tokenizer; a chat template has written them already
    thinks: bool = False  # first, so that completions need many tokens, and special ones are read: they mark thoughts


def stem_format() -> PromptFormat:
    """``mbxp``: the stem is the prompt; the completion ends with the function."""
    return PromptFormat("mbxp", _stem, function_end)


def function_end(task: Task) -> StopRule:
    """The rule that ends a completion with the function that the task's stem begins."""
    if task.language == "python":
        return PythonFunctionEnd(_stem(task), task.entry_point)
    return BraceEnd(task.language, _stem(task), task.entry_point)


def _stem(task: Task) -> str:
    if not task.stem:
        raise InputError(
            f"task {task.task_id} has no signature that a completion could continue, which the prompt format mbxp "
            'needs; use `prompt_format="austin"` or `prompt_format="bigcode"`'
        )
    return task.stem


def plain_format() -> PromptFormat:
    """``plain``: the stem is the prompt; the completion ends with the model's end token."""
    return PromptFormat("plain", _stem, lambda _: Unbounded())


def few_shot_format(examples: Sequence[Task], shots: int) -> PromptFormat:
    """``austin``: `shots` solved examples, then the task up to ``[BEGIN]``; the completion ends at ``[DONE]``."""
    if not 0 <= shots <= len(examples):
        few = "; pass a file that also holds the tasks 1 to 10" if not examples else ""
        raise InputError(f"`shots` must be between 0 and {len(examples)}, the solved examples, got {shots}{few}")
    shown = [solved_example(one.description, one.tests, one.reference or "") for one in examples[:shots]]
    return PromptFormat(
        "austin",
        lambda task: SEPARATOR.join([*shown, task_prompt(_described(task).description, task.tests)]),
        lambda task: StopWords([DONE], repaired=True),
    )


def _described(task: Task) -> Task:
    if task.stem or task.language != "python":
        raise InputError(
            f"task {task.task_id} begins with a signature; the prompt format austin is for MBPP's description and "
            'asserts, use `prompt_format="mbxp"`'
        )
    return task


# bigcode_eval/tasks/mbpp.py and bigcode_eval/tasks/humaneval.py
_MBPP_STOP_WORDS: Final = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n<|/", "\n```")
_HUMANEVAL_STOP_WORDS: Final = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```", "<file_sep>")


def docstring_format() -> PromptFormat:
    """``bigcode``: a docstring with the description and the first test, or the stem without white space around it."""
    return PromptFormat(
        "bigcode", _prompt, lambda task: StopWords(_HUMANEVAL_STOP_WORDS if task.stem else _MBPP_STOP_WORDS)
    )


def _prompt(task: Task) -> str:
    if task.language != "python":
        raise InputError(
            f'the prompt format bigcode is for Python, got a task in {task.language}; use `prompt_format="mbxp"`'
        )
    if task.stem:
        return task.stem.strip()
    return f'"""\n{task.description}\n{task.tests[0]}\n"""\n'


_FENCE: Final = "\n```"
_NAMES: Final = {"python": "Python", "java": "Java", "javascript": "JavaScript"}


class BlockEnd(StopWords):
    """Ends before the fence that closes a code block; of a block that begins with a stem, its function is kept."""

    def __init__(self, task: Task):
        super().__init__([_FENCE], repaired=not task.stem)
        self._task = task

    def kept(self, text: str) -> int:
        kept = super().kept(text)
        return function_end(self._task).kept(text[:kept]) if self._task.stem else kept

    def completion(self, text: str) -> str:
        block = text[: super().kept(text)]
        return function_end(self._task).completion(block) if self._task.stem else block


def chat_format(tokenizer: Any, arguments: Mapping[str, Any] = MappingProxyType({})) -> PromptFormat:
    """``chat``: one user's message that asks for the function, and the beginning of the answer.

    `arguments` are those of the template. Where it has the model think, ``chat-thinking``: the prompt ends where the
    template ends it.
    """
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise InputError(f"the tokenizer {name} has no chat template; leave out `chat`")

    def asked(message: str) -> str:
        messages = [{"role": "user", "content": message}]
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **arguments))

    thoughts = thoughts_of(template_of(tokenizer), asked(_MARK).rpartition(_MARK)[2])
    if thoughts is not None:
        found = thoughts
        return PromptFormat(
            "chat-thinking",
            lambda task: asked(_message(task)),
            lambda task: ThoughtfulAnswer(task, found),
            special_tokens=False,
            thinks=True,
        )
    return PromptFormat(
        "chat",
        lambda task: asked(_message(task)) + (f"```{task.language}\n{task.stem}" if task.tests else ""),
        lambda task: BlockEnd(task) if task.tests else Unbounded(),
        special_tokens=False,
    )


_MARK: Final = "the message"


def _message(task: Task) -> str:
    if not task.tests:
        return task.stem
    language = _NAMES[task.language]
    if task.stem:
        return f"Complete this {language} function, in one code block.\n\n```{task.language}\n{task.stem.strip()}\n```"
    tests = "\n".join(task.tests)
    return (
        f"{task.description}\n\nAnswer with a {language} program in one code block. "
        f"It should pass these tests:\n\n```{task.language}\n{tests}\n```"
    )
