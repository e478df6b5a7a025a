"""The format `chat`: a user's message through the tokenizer's chat template, answered in a code block.

The answer's code block is begun for the model, with the task's stem where there is one, as EvalPlus does. So the
completion continues the stem in every language, and ends with the block.
"""

from __future__ import annotations

from typing import Any, Final

from hf_fastdecode.errors import CommandError

from ..records import Task
from .completing import function_end
from .format import PromptFormat
from .stop_rules import StopWords

_FENCE: Final = "\n```"
_NAMES: Final = {"python": "Python", "java": "Java", "javascript": "JavaScript"}


class BlockEnd(StopWords):
    """Ends before the fence that closes a code block; of the block, the stem's function is kept.

    Args:
        task: Whose stem stands before the text, in the same block.
    """

    def __init__(self, task: Task):
        super().__init__([_FENCE], repaired=not task.stem)
        self._task = task

    def kept(self, text: str) -> int:
        kept = super().kept(text)
        return function_end(self._task).kept(text[:kept]) if self._task.stem else kept

    def completion(self, text: str) -> str:
        block = text[: super().kept(text)]
        return function_end(self._task).completion(block) if self._task.stem else block


def chat_format(tokenizer: Any) -> PromptFormat:
    """One user's message that asks for the function, and the beginning of the answer.

    Args:
        tokenizer: With a chat template.

    Raises:
        CommandError: It has none.
    """
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__
        raise CommandError(f"the tokenizer {name} has no chat template; leave out `chat`")

    def prompt(task: Task) -> str:
        messages = [{"role": "user", "content": _message(task)}]
        asked: str = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return f"{asked}```{task.language}\n{task.stem}"

    return PromptFormat("chat", prompt, BlockEnd, special_tokens=False)


def _message(task: Task) -> str:
    language = _NAMES[task.language]
    if task.stem:
        return f"Complete this {language} function, in one code block.\n\n```{task.language}\n{task.stem.strip()}\n```"
    tests = "\n".join(task.tests)
    return (
        f"{task.description}\n\nAnswer with a {language} program in one code block. "
        f"It should pass these tests:\n\n```{task.language}\n{tests}\n```"
    )
