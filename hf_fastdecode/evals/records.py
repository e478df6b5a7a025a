"""What passes between the stages of an evaluation: samples, verdicts, latencies."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "fail", "compile", "timeout", "memory", "output", "sandbox_error"]
"""Outcome of running a program on its tests; ``sandbox_error`` says nothing about the program."""

Way = Literal["shared", "stock"]
"""How samples are drawn: with hf_fastdecode, or by transformers as it is."""

Mode = Literal["eager", "graph", "compile"]
"""How decode steps run."""


@dataclass(frozen=True)
class Sample:
    """A completion of a task.

    Attributes:
        task_id: Of `Task`.
        index: Number of the sample among those of its task, from 0.
        completion: The text that continues the task's stem, truncated by the stop rules of the prompt format.
        tokens: Tokens that the log-probabilities are over; None where unknown.
        sum_logp: Sum of the model's log-probabilities of these tokens (natural logarithm, before temperature and
            nucleus); None where unknown.
        sum_processed_logp: The same after temperature and nucleus, as the tokens were drawn; None where not asked for.
    """

    task_id: str
    index: int
    completion: str
    tokens: int | None = None
    sum_logp: float | None = None
    sum_processed_logp: float | None = None

    @property
    def mean_logp(self) -> float | None:
        """Mean log-probability of a token; None where unknown."""
        return None if self.sum_logp is None or not self.tokens else self.sum_logp / self.tokens


@dataclass(frozen=True)
class Verdict:
    """The outcome of a sample's tests.

    Attributes:
        task_id: Of the sample.
        index: Of the sample.
        status: Outcome.
        detail: One line for people: the exception, the limit that was hit; empty for ``pass``.
        outputs: A hash of the program's answers to the tests, up to the first test that failed: the values that its
            functions returned, the classes of the exceptions that they raised, and how they left their arguments.
            Equal for programs whose answers are equal, as 1 and 1.0 are; an object that is not plain data, such as a
            generator, counts by what the tests learn from it. Empty where the program was asked for nothing, as one
            that does not load, where it met a limit, and for languages other than Python.
    """

    task_id: str
    index: int
    status: Status
    detail: str = ""
    outputs: str = ""

    @property
    def passed(self) -> bool:
        """Whether all tests passed."""
        return self.status == "pass"


@dataclass(frozen=True)
class Latency:
    """Drawing n samples of one prompt, in one way on one device.

    Times are medians (p50) over prompts, each timed once, or their 90th percentile where the name says so; NaN (an
    empty cell) where unknown. They are measured in runs of their own and say nothing about which samples pass.

    Attributes:
        way: ``shared`` (hf_fastdecode) or ``stock`` (transformers).
        mode: How decode steps run.
        n: Samples drawn at once.
        device: Such as ``NVIDIA H200`` or ``x86_64 CPU, 2 threads``.
        prefill_s: Seconds to the first token.
        ms_per_step_p50: Milliseconds of a decode step.
        ms_per_step_p90: The same, 90th percentile.
        first_sample_s: Seconds from the call to the first finished sample.
        median_sample_s: To the median finished sample.
        last_sample_s: To the last one, when all can be ranked: what accuracy is set against.
        first_sample_s_p90: 90th percentile over prompts.
        median_sample_s_p90: 90th percentile over prompts.
        last_sample_s_p90: 90th percentile over prompts.
        peak_bytes: Highest memory in use; None where unknown.
        runs: Prompts that were timed, after a warm-up.
        status: ``ok``, or why there are no numbers, such as ``out of memory``.
    """

    way: Way
    mode: Mode
    n: int
    device: str
    prefill_s: float = math.nan
    ms_per_step_p50: float = math.nan
    ms_per_step_p90: float = math.nan
    first_sample_s: float = math.nan
    median_sample_s: float = math.nan
    last_sample_s: float = math.nan
    first_sample_s_p90: float = math.nan
    median_sample_s_p90: float = math.nan
    last_sample_s_p90: float = math.nan
    peak_bytes: int | None = None
    runs: int = 0
    status: str = "ok"
