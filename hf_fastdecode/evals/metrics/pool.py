"""The judged samples of one task, as columns."""

from __future__ import annotations

import ast
import math
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Final, Literal

from ..records import Sample, Verdict


@dataclass(frozen=True)
class Pool:
    """The judged samples of one task.

    Attributes:
        task_id: The task's id.
        passed: Whether each sample passed.
        keys: Equal for duplicates.
        outputs: Equal for programs that answered their tests alike; None where unknown.
        mean_logp: Mean log-probability of a token; None where unknown, -inf for a completion without tokens, which
            therefore ranks last.
        sum_logp: Sum of the log-probabilities, likewise.
    """

    task_id: str
    passed: tuple[bool, ...]
    keys: tuple[Hashable, ...]
    outputs: tuple[str | None, ...]
    mean_logp: tuple[float | None, ...]
    sum_logp: tuple[float | None, ...]

    @property
    def correct(self) -> int:
        """Samples that passed."""
        return sum(self.passed)

    @property
    def distinct(self) -> int:
        """Groups of duplicates."""
        return len(set(self.keys))

    def settle(self) -> tuple[Pool, int]:
        """Give duplicates the verdict of their majority; a tie counts as failed. Returns the new pool and the number
        of samples whose verdict changed.

        Verdicts of duplicates differ where the scorer is flaky, e.g. by timeouts on a busy machine.
        """
        votes: Counter[Hashable] = Counter()
        for key, right in zip(self.keys, self.passed):
            votes[key] += 1 if right else -1
        passed = tuple(votes[key] > 0 for key in self.keys)
        changed = sum(before != after for before, after in zip(self.passed, passed))
        return replace(self, passed=passed), changed


def build_pools(
    samples: Iterable[Sample], verdicts: Iterable[Verdict], deduplicate: Deduplicate = "text"
) -> tuple[list[Pool], int]:
    """Join samples and verdicts into a pool for each task, in the order of the samples.

    Samples without a verdict, or with the verdict ``sandbox_error``, are left out. ``unjudged`` ones have not passed:
    a program could choose that status, so that leaving it out would raise the rates. Of several verdicts of a sample
    the last counts, because a scoring may have been repeated. `deduplicate` says what makes samples duplicates.

    Returns:
        The pools, without tasks that have no judged sample, and the number of samples left out.

    Raises:
        ValueError: A sample occurs twice with different contents, or a verdict has no sample.
    """
    by_id: dict[tuple[str, int], Sample] = {}
    for sample in samples:
        at = (sample.task_id, sample.index)
        if by_id.setdefault(at, sample) != sample:
            raise ValueError(
                f"sample {sample.index} of task {sample.task_id!r} is there twice with different contents; keep "
                "the file of one run"
            )
    judged: dict[tuple[str, int], Verdict] = {}
    for verdict in verdicts:
        at = (verdict.task_id, verdict.index)
        if at not in by_id:
            raise ValueError(
                f"a verdict names sample {verdict.index} of task {verdict.task_id!r}, which is not among the samples; "
                "the files are of different runs: remove the verdicts, and score the samples again"
            )
        judged[at] = verdict
    by_task: dict[str, list[tuple[Sample, Verdict]]] = {}
    left_out = 0
    for at, sample in by_id.items():
        found = judged.get(at)
        if found is None or found.status == "sandbox_error":
            left_out += 1
        else:
            by_task.setdefault(sample.task_id, []).append((sample, found))
    key = KEYS[deduplicate]
    pools = [
        Pool(
            task_id,
            tuple(verdict.passed for _, verdict in rows),
            tuple(key(sample.completion) for sample, _ in rows),
            tuple(verdict.outputs or None for _, verdict in rows),
            tuple(_ranked_last(sample, sample.mean_logp) for sample, _ in rows),
            tuple(_ranked_last(sample, sample.sum_logp) for sample, _ in rows),
        )
        for task_id, rows in by_task.items()
    ]
    return pools, left_out


def _ranked_last(sample: Sample, score: float | None) -> float | None:
    return -math.inf if sample.sum_logp is not None and sample.tokens == 0 else score


Deduplicate = Literal["text", "ast"]
"""By equal texts, or by equal Python syntax trees."""


def text_key(completion: str) -> str:
    """The text itself."""
    return completion


def ast_key(completion: str) -> tuple[str, ...]:
    """The Python syntax tree: comments, blank lines, quotes and parentheses make no difference; docstrings do.

    A completion that is not a program by itself is parsed as the body of a function, as it continues a signature;
    bodies of different indentation differ. What cannot be parsed either way is compared as text.
    """
    body = completion.lstrip("\r\n")
    indentation = body[: len(body) - len(body.lstrip(" \t"))]
    for program, more in ((completion, ()), (f"def _():\n{completion}", (indentation,))):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of invalid escapes, for each completion that has them
                return "ast", ast.dump(ast.parse(program)), *more
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # ValueError: a null byte
            continue
    return "text", completion


KEYS: Final[dict[Deduplicate, Callable[[str], str | tuple[str, ...]]]] = {"text": text_key, "ast": ast_key}
"""Functions from a completion to a key that is equal for duplicates."""
