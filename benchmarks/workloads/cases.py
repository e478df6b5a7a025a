"""The cases, ways and prompts of the workloads as data, without torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.prompts import prompt_format
from hf_fastdecode.evals.tasks import TaskSet
from hf_fastdecode.measurement.rows import Case


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
    """MBPP's few-shot prompt (Austin et al. 2021) of each problem."""
    form = prompt_format(tasks, "austin", shots=shots)
    return [form.prompt(task) for task in tasks.tasks]
