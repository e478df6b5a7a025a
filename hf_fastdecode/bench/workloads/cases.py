"""The cases and ways of the workloads as data, without torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

SAMPLING: Final = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}
"""How samples of problems are drawn: arguments of `generate`."""
GREEDY: Final = {"do_sample": False}
"""How answers are drawn."""


@dataclass(frozen=True)
class Level:
    """Which runs of tokens are stored once.

    Attributes:
        words: The same for people.
        shared: Whether hf_fastdecode generates.
        rows_apart: Whether no two neighbouring rows are of one problem, so that they share what all rows do.
        problems_apart: Whether no problem shares anything with another.
    """

    words: str
    shared: bool = True
    rows_apart: bool = False
    problems_apart: bool = False


LEVELS: Final = {
    "none": Level("no sharing: stock transformers", shared=False),
    "few-shot": Level("one level: the examples", rows_apart=True),
    "problem": Level("one level: each problem's prompt", problems_apart=True),
    "two-level": Level("two levels: examples, problems"),
}
"""By name; the single level of the paper is ``few-shot``."""

WAYS: Final = {"shared": "hf_fastdecode", "stock": "stock transformers"}
"""Of asking questions, by name."""


@dataclass(frozen=True)
class HierCase:
    """A call: `samples` of each of the first `problems`.

    Attributes:
        model: Its name.
        dtype: Of the parameters.
        task: Name of the tasks.
        shots: Solved examples before each problem.
        problems: How many.
        samples: Of each.
        shared_tokens: That all prompts begin with.
        prompt_tokens: Of the longest prompt.
        new_tokens: Of each sample.
    """

    model: str
    dtype: str
    task: str
    shots: int
    problems: int
    samples: int
    shared_tokens: int
    prompt_tokens: int
    new_tokens: int

    def columns(self) -> dict[str, Any]:
        """What tells it from others in a row."""
        return asdict(self)


@dataclass(frozen=True)
class QuestionsCase:
    """A call: so many questions, a row each.

    Attributes:
        model: Its name.
        dtype: Of the parameters.
        document: Name of the text.
        facts: In the text, that are asked about; with more questions they come again.
        prefix_tokens: That all rows begin with: the text and the solved questions.
        questions: Rows.
        new_tokens: Of each answer.
    """

    model: str
    dtype: str
    document: str
    facts: int
    prefix_tokens: int
    questions: int
    new_tokens: int

    def columns(self) -> dict[str, Any]:
        """What tells it from others in a row."""
        return asdict(self)
