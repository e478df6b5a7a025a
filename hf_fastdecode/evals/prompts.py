"""Prompt formats: how a task becomes a prompt, and how a completion is cut out of a model's text.

- ``mbxp``: the model continues a task's signature and docstring (Athiwaratkun et al. 2022, section 4).
- ``plain``: a prompt as it is; the completion is all that follows.
- ``austin``: MBPP's few-shot prompt (Austin et al. 2021, section 3.1).
- ``bigcode``: the zero-shot prompts of bigcode-evaluation-harness with its stop words. A completion is cut at the
  first stop word and not repaired, as there, so that verdicts can be compared.
- ``chat``: a user's message through the tokenizer's chat template. The code block of the answer is begun with the
  task's stem, if there is one, as EvalPlus does, so that the completion continues the stem and ends with the block. Of
  a prompt without tests, the completion is the whole answer.
- ``chat-thinking``: the same message to a model that thinks first. The answer has the model's format; the program is
  the first code block after its thoughts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from ..assets import DONE, SEPARATOR, solved_example, task_prompt
from ..errors import InputError
from .records import Task
from .stop_rules import BraceEnd, PythonFunctionEnd, StopRule, StopWords, Unbounded, longest_parsing_prefix, parses
from .tasks import TaskSet


@dataclass(frozen=True)
class Thoughts:
    """The marks of a model's thoughts."""

    opening: str
    closing: str  # the answer is what follows it
    opened: bool = False  # by the prompt: the text begins inside


CHANNELS: Final = Thoughts("<|channel|>", "<|channel|>final<|message|>")
"""gpt-oss (harmony) names a channel for each message; that of the answer is ``final``."""

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
    """How a model marks its thoughts, by its template and the prompt after a message; None if it does not think."""
    if prompt.rstrip().endswith("<|start|>assistant"):
        return CHANNELS
    for known in _KNOWN:
        if known.closing in prompt:
            return None
        if known.opening in prompt:
            return Thoughts(known.opening, known.closing, opened=True)
    return next((known for known in _KNOWN if known.opening in template or known.closing in template), None)


class ThoughtfulAnswer(StopRule):
    """Ends after the answer's first code block, or with the text; to a prompt without tests, all is the answer."""

    def __init__(self, task: Task, thoughts: Thoughts):
        self._task, self._thoughts = task, thoughts

    def answer_start(self, text: str) -> int | None:
        """Return the number of characters before the answer; None while the model thinks."""
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

    def _find(self, text: str) -> int | None:
        start = self.answer_start(text) if self._task.tests else None
        block = None if start is None else _BLOCK.search(text[start:])
        return start + block.end() if start is not None and block and block["end"] else None


_BLOCK: Final = re.compile(r"^[ \t]*```[^\n`]*\n(?P<program>.*?)(?P<end>^[ \t]*```|\Z)", re.M | re.S)


def continued(task: Task, program: str) -> str:
    """Make a whole program the completion of a task's stem; an InputError for Java without a method of that name."""
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


@dataclass(frozen=True)
class PromptFormat:
    """A prompt format: prompts of tasks, and the end of completions."""

    name: str  # as on the command line
    prompt: Callable[[Task], str]
    stop_rule: Callable[[Task], StopRule]  # a new one for each completion; it also cuts the completion out of a text
    special_tokens: bool = True  # of the tokenizer; a chat template has written them already
    thinks: bool = False  # first, so that completions need many tokens, and special ones are read: they mark thoughts


def function_end(task: Task) -> StopRule:
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
    if task.stem and not task.tests:
        raise InputError(
            f"task {task.task_id} is a prompt without tests; the prompt format austin is for MBPP's description and "
            "asserts, leave out `prompt_format`"
        )
    if task.stem or task.language != "python":
        raise InputError(
            f"task {task.task_id} begins with a signature; the prompt format austin is for MBPP's description and "
            'asserts, use `prompt_format="mbxp"`'
        )
    return task


# bigcode_eval/tasks/mbpp.py and bigcode_eval/tasks/humaneval.py
_MBPP_STOP_WORDS: Final = ("\nclass", "\nassert", '\n"""', "\nprint", "\nif", "\n<|/", "\n```")
_HUMANEVAL_STOP_WORDS: Final = ("\nclass", "\ndef", "\n#", "\n@", "\nprint", "\nif", "\n```", "<file_sep>")


def _docstring(task: Task) -> str:
    """A docstring with the description and the first test, or the stem without white space around it."""
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
    """``chat``: one user's message that asks for the function, and the prefix of the answer.

    `arguments` are those of the template. Where it has the model think, ``chat-thinking``: the prompt ends where the
    template ends it.
    """
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise InputError(f"the tokenizer {name} has no chat template; leave out `chat`")

    def asked(message: str) -> str:
        messages = [{"role": "user", "content": message}]
        return str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **arguments))

    def prompt(task: Task) -> str:
        return asked(_message(task)) + (f"```{task.language}\n{task.stem}" if task.tests and thoughts is None else "")

    def stop_rule(task: Task) -> StopRule:
        if thoughts is not None:
            return ThoughtfulAnswer(task, thoughts)
        return BlockEnd(task) if task.tests else Unbounded()

    template = tokenizer.chat_template
    text = "\n".join(map(str, template.values())) if isinstance(template, dict) else str(template)
    thoughts = thoughts_of(text, asked(_MARK).rpartition(_MARK)[2])
    name, thinks = ("chat", False) if thoughts is None else ("chat-thinking", True)
    return PromptFormat(name, prompt, stop_rule, special_tokens=False, thinks=thinks)


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


FORMAT_NAMES: Final = ("mbxp", "austin", "bigcode")
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
        found = PromptFormat("plain", _stem, lambda task: Unbounded())
    elif chosen == "mbxp":
        found = PromptFormat("mbxp", _stem, function_end)
    elif chosen == "austin":
        _described(first)  # before the examples, of which there are none then
        found = few_shot_format(tasks.examples, shots)
    elif chosen == "bigcode":
        found = PromptFormat(
            "bigcode", _docstring, lambda task: StopWords(_HUMANEVAL_STOP_WORDS if task.stem else _MBPP_STOP_WORDS)
        )
    else:
        raise InputError(f"there is no prompt format {chosen!r}; choose one of {', '.join(FORMAT_NAMES)}")
    found.prompt(first)  # a format that does not suit the tasks says so now
    return found
