"""The cases, ways and prompts of the workloads as data, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.prompts import prompt_format
from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.tasks import TaskSet
from hf_fastdecode.measurement.rows import Case

APPS: Final = "apps"

GREEDY: Final = {"do_sample": False}
"""How answers are drawn."""


@dataclass(frozen=True)
class Level:
    """A level of sharing: the runs of tokens that are stored once."""

    words: str
    shared: bool = True  # hf_fastdecode generates
    rows_apart: bool = False  # neighbouring rows are of different problems, so that they share what all rows do
    problems_apart: bool = False  # no problem shares anything with another


LEVELS: Final = {
    "none": Level("nothing (stock)", shared=False),
    "few-shot": Level("the examples", rows_apart=True),
    "problem": Level("each problem's prompt", problems_apart=True),
    "two-level": Level("examples, then problems"),
}
"""By name; the single level of the paper is ``few-shot``."""

WAYS: Final = {"shared": "hf_fastdecode", "stock": "stock transformers"}
"""Ways of asking questions, by name."""


@dataclass(frozen=True)
class HierCase(Case):
    """`samples` of each of the first `problems`, whose prompts begin with `shared_tokens`."""

    model: str
    dtype: str
    task: str
    shots: int
    problems: int
    samples: int
    shared_tokens: int
    prompt_tokens: int
    new_tokens: int


@dataclass(frozen=True)
class QuestionsCase(Case):
    """A call with a row for each question about one of `facts`; all rows begin with `prefix_tokens`."""

    model: str
    dtype: str
    document: str
    facts: int
    prefix_tokens: int
    questions: int
    new_tokens: int


def parse_points(text: str) -> list[tuple[int, int]]:
    """Problems and samples from ``4x8,8x16``, in the order given; InputError where a point is of another form."""
    points = []
    for part in (part.strip() for part in text.split(",")):
        point = re.fullmatch("(0*[1-9][0-9]*)x(0*[1-9][0-9]*)", part)
        if point is None:
            raise InputError(f"`points` are PROBLEMSxSAMPLES with commas between, such as 4x8,8x16, got {part!r}")
        points.append((int(point[1]), int(point[2])))
    return list(dict.fromkeys(points))


def check_point(problems: int, samples: int, available: int) -> None:
    """Refuse, by an InputError, a point where levels of sharing do not differ, or for which problems are too few."""
    if problems < 2 or samples < 2:
        raise InputError(
            f"`points={problems}x{samples}`: levels of sharing differ from 2 problems and 2 samples on; ask for more"
        )
    if problems > available:
        raise InputError(
            f"`points={problems}x{samples}` asks for {problems} problems, there are {available}; ask for fewer, or "
            "name a larger `data`"
        )


def problem_prompts(tasks: TaskSet, shots: int) -> list[str]:
    """A prompt for each problem: MBPP's few-shot one (Austin et al. 2021), for APPS its own (Hendrycks et al. 2021).

    APPS has no tasks set apart as examples: its first problems with a solution are, and problems with starter code are
    left out, as in Hydragen, appendix D.4. Raises InputError where examples or problems are too few.
    """
    if tasks.name != APPS:
        form = prompt_format(tasks, "austin", shots=shots)
        return [form.prompt(task) for task in tasks.tasks]
    plain = [task for task in tasks.tasks if not task.setup]
    examples = [task for task in plain if task.reference][:shots]
    problems = [task for task in plain if task not in examples]
    if len(examples) < shots or not problems:
        raise InputError(
            f"{tasks.origin} has {len(plain)} problems without starter code, too few for {shots} solved examples and "
            "a problem; name a larger `data` or lower `shots`"
        )
    shown = "".join(f"{_asked(task)}{(task.reference or '').strip()}\n\n" for task in examples)
    return [shown + _asked(task) for task in problems]


def _asked(task: Task) -> str:
    return f"QUESTION:\n{task.description.strip()}\n\nUse Standard Input format\n\nANSWER:\n"
