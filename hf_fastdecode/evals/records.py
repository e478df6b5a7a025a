"""Records of the stages of an evaluation: tasks, samples, verdicts, latencies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields
from numbers import Real
from pathlib import Path
from typing import Any, Final, Literal, TypeVar, get_args

from ..files import Record, jsonl_records, shown

Language = Literal["python", "java", "javascript"]

Status = Literal["pass", "fail", "compile", "timeout", "memory", "output", "unjudged", "sandbox_error"]
"""Outcome of running a program on its tests. Two say nothing about the program: ``unjudged``, where its tests need one
process for both, and ``sandbox_error``."""

Way = Literal["shared", "stock"]
"""The library that draws samples: hf_fastdecode, or transformers as it is."""

Mode = Literal["eager", "graph"]
"""The mode of decode steps."""


@dataclass(frozen=True)
class Task:
    """A programming task with tests."""

    task_id: str  # as published, e.g. "11" (MBPP), "MBJP/3" (MBXP), "HumanEval/0"
    language: Language
    description: str  # in English
    stem: str  # what a completion continues, such as a signature; empty where that is a whole program (MBPP)
    tests: tuple[str, ...]  # asserts (MBPP), or one program that checks the entry point (MBXP, HumanEval)
    entry_point: str = ""  # name of the function under test, if the task names it
    setup: str = ""  # code that runs before the tests: imports, test data
    reference: str | None = None  # a completion that passes the tests, if one is published

    def program(self, completion: str) -> str:
        return self.stem + completion


@dataclass(frozen=True)
class Sample:
    """A completion of a task.

    Log-probabilities are natural logarithms of the model's probabilities, summed over `tokens` tokens; None where
    unknown.
    """

    task_id: str
    index: int  # among the samples of its task, from 0
    completion: str  # what continues the task's stem, truncated by the stop rules of the prompt format
    tokens: int | None = None
    sum_logp: float | None = None  # before temperature and nucleus
    sum_processed_logp: float | None = None  # after them, as the tokens were drawn; None where not asked for
    thought_tokens: int | None = None  # of `tokens`, those before the answer, all where it was not reached; None where
    # the prompt format has no thoughts

    @property
    def mean_logp(self) -> float | None:
        """Mean log-probability of a token; None where unknown."""
        return None if self.sum_logp is None or not self.tokens else self.sum_logp / self.tokens


def thoughts_line(samples: Sequence[Sample]) -> str:
    """Say how much samples think, and how many never reached an answer; empty where none thinks."""
    thoughts = [(one.thought_tokens, one.tokens) for one in samples if one.thought_tokens is not None]
    if not thoughts:
        return ""
    cut = sum(thought == all_of_it for thought, all_of_it in thoughts)
    said = f"Samples think first, {statistics.median(thought for thought, _ in thoughts):,.0f} tokens in the median"
    if not cut:
        return said
    return f"{said}; {cut:,} of {len(thoughts):,} did not reach an answer within the new tokens that they had"


@dataclass(frozen=True)
class Verdict:
    """The outcome of a sample's tests.

    `outputs` is a hash of the program's answers to the tests, up to the first failed test: returned values, classes of
    raised exceptions, and how arguments were changed. It is equal for equal answers, such as 1 and 1.0; an object that
    is not plain data, such as a generator, counts by what the tests learn from it. Empty where the program was asked
    for nothing, such as one that does not load, where it met a limit, and for other languages than Python.
    """

    task_id: str
    index: int  # the sample's
    status: Status
    detail: str = ""  # one line for people: the exception, the limit that was hit; empty for a pass
    outputs: str = ""

    @property
    def passed(self) -> bool:
        return self.status == "pass"


@dataclass(frozen=True)
class Latency:
    """Drawing n samples of one prompt, in one way on one device.

    Times are medians (p50) over prompts, each timed once, or their 90th percentile where the name says so; NaN (an
    empty cell) where unknown. They are measured in separate runs and say nothing about which samples pass.
    """

    way: Way
    mode: Mode
    n: int  # samples drawn at once
    device: str  # such as NVIDIA H200, or x86_64 CPU, 2 threads
    prefill_s: float = math.nan  # until the first token
    ms_per_step_p50: float = math.nan
    ms_per_step_p90: float = math.nan
    first_sample_s: float = math.nan  # from the call until the first sample is finished
    median_sample_s: float = math.nan
    last_sample_s: float = math.nan  # when all can be ranked: what accuracy is set against
    first_sample_s_p90: float = math.nan
    median_sample_s_p90: float = math.nan
    last_sample_s_p90: float = math.nan
    peak_bytes: int | None = None  # of memory in use; None where unknown
    runs: int = 0  # prompts that were timed, after a warm-up
    status: str = "ok"  # or why there are no measurements, such as out of memory


SampleOrVerdict = TypeVar("SampleOrVerdict", Sample, Verdict)


def read_samples(path: Path) -> list[Sample]:
    """Read samples that `JsonlWriter` wrote; further fields are ignored, a wrong one is an InputError."""
    return [_record(Sample, record) for record in jsonl_records(path)]


def read_verdicts(path: Path) -> list[Verdict]:
    """Read verdicts that `JsonlWriter` wrote; further fields are ignored, a wrong one is an InputError."""
    verdicts = []
    for record in jsonl_records(path):
        verdict = _record(Verdict, record)
        if verdict.status not in get_args(Status):
            raise record.error(
                f"status must be one of {', '.join(get_args(Status))}, got {shown(verdict.status)} for sample "
                f"{verdict.index} of task {shown(verdict.task_id)}; score the samples again"
            )
        verdicts.append(verdict)
    return verdicts


def _record(kind: type[SampleOrVerdict], record: Record) -> SampleOrVerdict:
    line, given = record.fields, dict[str, Any]()
    for field in fields(kind):
        wanted, in_json = _KINDS[field.name]
        value = line.get(field.name, None if field.default is MISSING else field.default)
        is_right = isinstance(value, wanted) and not (isinstance(value, float) and not math.isfinite(value))
        if not is_right and (value is not None or field.default is not None):
            got = shown(value) if field.name in line else f"only {shown(', '.join(sorted(line)) or 'none')}"
            name = f"{field.name} of a {kind.__name__.lower()}"
            raise record.error(f"{name} must be a {in_json}, got {got}; mend or delete that line")
        given[field.name] = value
    return kind(**given)


_KINDS: Final[dict[str, tuple[type, str]]] = {
    **dict.fromkeys(("task_id", "completion", "status", "detail", "outputs"), (str, "text")),
    **dict.fromkeys(("index", "tokens", "thought_tokens"), (int, "whole number")),
    **dict.fromkeys(("sum_logp", "sum_processed_logp"), (Real, "finite number")),
}
