"""What passes between the stages of an evaluation: samples and verdicts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "fail", "compile", "timeout", "memory", "output", "sandbox_error"]
"""Outcome of running a program on its tests; ``sandbox_error`` says nothing about the program."""


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
    """

    task_id: str
    index: int
    completion: str
    tokens: int | None = None
    sum_logp: float | None = None

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
    """

    task_id: str
    index: int
    status: Status
    detail: str = ""

    @property
    def passed(self) -> bool:
        """Whether all tests passed."""
        return self.status == "pass"
