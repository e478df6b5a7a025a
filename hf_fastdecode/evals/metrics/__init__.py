"""Metrics over pools of judged samples: pass@k, pass@top-m and other rankers, intervals over problems.

Plain functions, without torch. `PassAtTopK` is a metric of `evaluate`, which is imported on demand: it takes seconds.
"""

from __future__ import annotations

import ast
import math
import warnings
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from ..records import Sample, Verdict
from .estimates import check_m, check_ns, group_sizes, pass_at_first_m, pass_at_k, pass_at_n, pass_at_top_m

if TYPE_CHECKING:
    from .evaluate_metric import PassAtTopK

__all__ = ["RANKERS", "Pool", "Ranker", "ast_key", "build_pools", "pass_at_ranker", "pass_at_votes"]
__all__ += ["PassAtTopK", "pass_at_first_m", "pass_at_k", "pass_at_n", "pass_at_top_m"]


def __getattr__(name: str) -> Any:
    if name == "PassAtTopK":
        from .evaluate_metric import PassAtTopK

        return PassAtTopK
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@dataclass(frozen=True)
class Pool:
    """The judged samples of one task."""

    task_id: str
    passed: tuple[bool, ...]
    keys: tuple[Hashable, ...]  # equal for duplicates
    outputs: tuple[str | None, ...]  # equal for programs that answered their tests alike; None where unknown
    mean_logp: tuple[float | None, ...]  # of a token; None where unknown, -inf without tokens, which ranks last
    sum_logp: tuple[float | None, ...]  # likewise

    def settle(self) -> tuple[Pool, int]:
        """Give duplicates the verdict of their majority, a tie counting as failed, and count those that changed.

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
    """Join samples and verdicts into pools of tasks with a judged sample, in their order, and count those left out.

    Samples without a verdict, or with the verdict ``sandbox_error``, are left out. ``unjudged`` ones have not passed:
    a program could choose that status, so that leaving it out would raise the rates. Of several verdicts of a sample
    the last counts, because a scoring may have been repeated. A ValueError where a sample occurs twice with different
    contents, or a verdict has no sample.
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
    key = ast_key if deduplicate == "ast" else str
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
"""How duplicates are found: by equal text, or by equal Python syntax tree."""


def ast_key(completion: str) -> tuple[str, ...]:
    """Return the Python syntax tree: comments, blank lines, quotes and parentheses do not count; docstrings do.

    A completion that is not a program by itself is parsed as the body of a function, as it continues a signature;
    bodies of different indentation differ. What cannot be parsed as either is compared as text.
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


Ranker = Literal["oracle", "mean_logp", "sum_logp", "random", "votes"]
"""The ranking that chooses the m candidates that are run among n samples.

- ``oracle``: all n are run, which is pass@n.
- ``mean_logp``, ``sum_logp``: the highest mean, or sum, of the log-probabilities of the tokens; exact.
- ``random``: the first distinct ones in the order drawn; exact.
- ``votes``: programs whose outputs most samples agree on; a sample without outputs agrees with those of its text, so
  that where none are known, the most frequent texts win. Monte Carlo.
"""

RANKERS: Final[tuple[Ranker, ...]] = get_args(Ranker)


def pass_at_ranker(
    pool: Pool, ranker: Ranker, ns: Sequence[int], *, m: int = 3, draws: int = 1000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Probability that one of a ranker's m candidates passes, for each number of samples in `ns`.

    `draws` random subsets per n, from a seed combined with the task's id, are for ``votes``; the oracle runs all.
    Returns probabilities and, where they are estimates, standard errors, both [len(ns)].
    """
    try:
        check_ns(ns, len(pool.passed))
        match ranker:
            case "oracle":
                found = pass_at_n(pool.passed)
            case "random":
                found = pass_at_first_m(pool.passed, pool.keys, m)
            case "mean_logp" | "sum_logp":
                scores = pool.mean_logp if ranker == "mean_logp" else pool.sum_logp
                found = pass_at_top_m(pool.passed, scores, pool.keys, m)
            case "votes":
                # Every sample votes: a ranking must not know which samples are right. Outputs that pass once and fail
                # once, as by printed text, are two.
                votes = [
                    ("text", key) if output is None else ("outputs", output, right)
                    for key, output, right in zip(pool.keys, pool.outputs, pool.passed)
                ]
                task_seed = zlib.crc32(f"{seed} {pool.task_id}".encode(errors="replace"))
                return pass_at_votes(pool.passed, votes, ns, m=m, draws=draws, seed=task_seed)
            case _:
                raise ValueError(f"the ranker must be one of {', '.join(RANKERS)}, got {ranker!r}")
    except ValueError as error:
        raise ValueError(f"task {pool.task_id!r}: {error}") from error
    return found[[n - 1 for n in ns]], None


def pass_at_votes(
    passed: Sequence[bool],
    outputs: Sequence[Hashable | None],
    ns: Sequence[int],
    *,
    m: int = 1,
    draws: int = 1000,
    seed: int = 0,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Estimate the probability that one of the m most frequent outputs of n samples is right, by Monte Carlo.

    Self-consistency (Wang et al. 2023) for m = 1. Each of `draws` random subsets of n samples, at least 2, gives the
    probability over a uniformly random order of tied outputs; the result is their mean and its standard error, both
    [len(ns)]. An exact count would be too expensive for a thousand samples. `outputs` are what each sample's program
    returned, or its text; None, as for a program that crashed, has no vote.
    """
    check_m(m)
    if draws < 2:
        raise ValueError(f"draws must be at least 2 for a standard error, got {draws}; use 1000")
    # Samples without an output are groups of one each, which never count.
    keys = [("none", index) if output is None else ("output", output) for index, output in enumerate(outputs)]
    passing, failing = group_sizes(passed, keys)
    sizes = np.array([*passing.values(), *failing.values()])
    right = np.arange(len(sizes)) < len(passing)
    votes = np.array([key[0] == "output" for key in (*passing, *failing)])  # type: ignore[index]
    check_ns(ns, len(passed))
    generator = np.random.default_rng(seed)
    means, errors = np.empty(len(ns)), np.empty(len(ns))
    for at, n in enumerate(ns):
        if n == 1:  # nothing is voted on
            means[at], errors[at] = (sizes * votes * right).sum() / len(passed), 0.0
            continue
        # The method "marginals" takes memory by groups and not by samples.
        counts = generator.multivariate_hypergeometric(sizes, n, size=draws, method="marginals")
        chances = _chances(counts * votes, right, m)
        means[at], errors[at] = chances.mean(), chances.std(ddof=1) / draws**0.5
    return means, errors


def _chances(counts: NDArray[np.int64], right: NDArray[np.bool_], m: int) -> NDArray[np.float64]:
    """Compute the chance that one of the m largest groups is right, over random orders of ties, for each draw.

    counts: [draws, groups].
    """
    least = np.partition(counts, -m, axis=1)[:, -m] if m < counts.shape[1] else np.zeros(len(counts), dtype=np.int64)
    least = np.maximum(least, 1)[:, None]  # a group that was not drawn is no candidate
    above, tied = counts > least, counts == least
    vacant = np.minimum(m - above.sum(axis=1), tied.sum(axis=1))
    tied_total, tied_right = tied.sum(axis=1), (tied & right).sum(axis=1)
    missed = np.where((above & right).any(axis=1), 0.0, 1.0)
    # The m candidates are completed from the tied groups, without replacement.
    for taken in range(min(m, counts.shape[1])):
        wrong, left = tied_total - tied_right - taken, tied_total - taken
        missed *= np.where(taken < vacant, np.maximum(wrong, 0) / np.maximum(left, 1), 1.0)
    return 1.0 - missed
