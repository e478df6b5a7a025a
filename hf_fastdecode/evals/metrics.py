"""Metrics over pools of judged samples: pass@k, pass@top-m and other rankers, exact for every n at once; intervals.

Without torch. `PassAtTopK` is a metric of `evaluate`, which is imported on demand: it takes seconds.
"""

from __future__ import annotations

import ast
import math
import warnings
import zlib
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from math import comb
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from .records import Sample, Verdict


def __getattr__(name: str) -> Any:
    if name == "PassAtTopK":
        return import_module(f"{__package__}.evaluate_metric").PassAtTopK
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

        They differ where the scorer is flaky, e.g. by timeouts on a busy machine.
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
    pool: Pool, ranker: Ranker, ns: Sequence[int], *, m: int = 3, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64] | None]:
    """Probability that one of a ranker's m candidates passes, for each number of samples in `ns`.

    Random subsets, from a seed combined with the task's id, are for ``votes``; the oracle runs all. Returns
    probabilities and, where they are estimates, standard errors, both [len(ns)].
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
                return pass_at_votes(pool.passed, votes, ns, m=m, seed=task_seed)
            case _:
                raise ValueError(f"the ranker must be one of {', '.join(RANKERS)}, got {ranker!r}")
    except ValueError as error:
        raise ValueError(f"task {pool.task_id!r}: {error}") from error
    return found[[n - 1 for n in ns]], None


def pass_at_votes(
    passed: Sequence[bool],
    outputs: Sequence[Hashable],
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
    returned, or its text.
    """
    check_m(m)
    passing, failing = group_sizes(passed, outputs)
    sizes = np.array([*passing.values(), *failing.values()])
    right = np.arange(len(sizes)) < len(passing)
    check_ns(ns, len(passed))
    generator = np.random.default_rng(seed)
    means, errors = np.empty(len(ns)), np.empty(len(ns))
    for at, n in enumerate(ns):
        if n == 1:  # nothing is voted on
            means[at], errors[at] = (sizes * right).sum() / len(passed), 0.0
            continue
        # The method "marginals" takes memory by groups and not by samples.
        counts = generator.multivariate_hypergeometric(sizes, n, size=draws, method="marginals")
        chances = _chances(counts, right, m)
        means[at], errors[at] = chances.mean(), chances.std(ddof=1) / draws**0.5
    return means, errors


def _chances(counts: NDArray[np.int64], right: NDArray[np.bool_], m: int) -> NDArray[np.float64]:
    """Chance that one of the m largest groups is right, over random orders of ties; counts: [draws, groups]."""
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


def pass_at_k(n: int, c: int, k: int) -> float:
    """Estimate the probability that one of k samples passes, from n samples of which c passed.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1: ``1 - C(n - c, k) / C(n, k)``, in
    the numerically stable product form of its figure 3, ``1 - prod_{i = n - c + 1}^{n} (1 - k / i)``. A ValueError
    unless k >= 1, n >= k and 0 <= c <= n.
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}; pass@k counts the samples that are looked at")
    if n < k:
        raise ValueError(f"n must be at least k, got n = {n} < k = {k}; draw more samples or lower k")
    if not 0 <= c <= n:
        raise ValueError(f"c must be between 0 and n = {n}, got {c}; c counts the passing samples among the n")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


def bootstrap_interval(
    values: ArrayLike, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Bootstrap the percentile interval of the mean over problems, at a level between 0 and 1.

    Problems are drawn with replacement, and the samples of a problem stay together. `values` are [problems] or
    [problems, columns], such as pass@n of each problem for several n; all columns are resampled alike, so that
    intervals of one call can be compared. Returns lower and upper ends, [columns] each (no dimension for one column);
    NaN for a single problem.
    """
    table = np.asarray(values, dtype=np.float64)
    if not table.ndim or not len(table):
        raise ValueError("an interval over problems needs at least one problem, got none")
    problems = len(table)
    if problems == 1:
        unknown = np.full(table.shape[1:], np.nan)
        return unknown, unknown.copy()
    generator = np.random.default_rng(seed)
    means = np.empty((resamples, *table.shape[1:]))
    for start in range(0, resamples, 1000):  # in parts, for memory
        part = means[start : start + 1000]
        part[:] = generator.multinomial(problems, [1 / problems] * problems, size=len(part)) @ table / problems
    tail = (1 - level) / 2
    low, high = np.quantile(means, [tail, 1 - tail], axis=0)
    return low, high


def pass_at_n(passed: Sequence[bool]) -> NDArray[np.float64]:
    """pass@n for n = 1..N, [N]: the mean over all subsets of n of a task's N samples (`pass_at_k` with k = n)."""
    check_pool(passed, passed)
    samples, wrong = len(passed), sum(not right for right in passed)
    all_of, none_of = binomials(samples), binomials(wrong)
    missed = [none_of[n] if n <= wrong else 0 for n in range(1, samples + 1)]
    return np.array([(every - miss) / every for every, miss in zip(all_of[1:], missed)])


def pass_at_top_m(
    passed: Sequence[bool], scores: Sequence[float | None], keys: Sequence[Hashable], m: int
) -> NDArray[np.float64]:
    """pass@top-m for n = 1..N, exactly: the mean over all subsets of n samples of a pool of N.

    Among n samples, those with equal keys are one candidate, ranked by the best score among its samples *in the
    subset*; the m best candidates are run, and the subset counts if one of them passes (Bifurcated attention, section
    5.4: deduplicate, rank by mean log-probability, run three). Where scores tie, failing samples rank before passing
    ones, so that ties never help the ranking and the order of the pool does not matter.

    A subset counts if fewer than m groups of failing duplicates rank before its best passing sample. The sum goes over
    that sample: passing samples before it are left out, samples after it are free, and `HitCounter` counts the
    failing ones before it. All integers, with one correctly rounded division each at the end; cost O(m N^2).

    Args:
        passed: The verdicts of one task's N samples.
        scores: Higher is better, such as the mean log-probability of a token; -inf is a score, None is a missing one.
        keys: Equal for duplicates, such as the text; they must be equal in `passed`, too.
        m: Candidates that are run, at least 1.

    Returns:
        [N] probabilities; entry n - 1 is for n samples.
    """
    check_m(m)
    check_pool(passed, keys)
    known = checked_scores(scores, len(passed))
    failing = group_sizes(passed, keys)[1]
    if m > len(failing):
        return pass_at_n(passed)
    samples = len(passed)
    hits = HitCounter(samples, len(failing), m)
    found = np.zeros(samples, dtype=hits.dtype)  # in u
    counted: Counter[Hashable] = Counter()
    ranked = sorted(range(samples), key=lambda index: (-known[index], passed[index]))
    for rank, index in enumerate(ranked):
        if passed[index]:
            below_m = hits.below_m()
            after = samples - 1 - rank
            found[after : after + len(below_m)] += below_m
        else:
            key = keys[index]
            hits.grow(counted[key], counted[key] + 1)
            counted[key] += 1
    return np.array([count / every for count, every in zip(by_size(found), binomials(samples)[1:])])


def pass_at_first_m(passed: Sequence[bool], keys: Sequence[Hashable], m: int) -> NDArray[np.float64]:
    """pass@m of a ranking without information, for n = 1..N: the first m distinct samples in the order drawn.

    The mean over all orders of drawing n of the pool's N samples. Let A(t) be the number of subsets of t failing
    samples in fewer than m groups, and c the number of passing samples: draw t + 1 is the first to pass, in time, with
    probability ``A(t) / C(N, t) * c / (N - t)``; the result is the sum over t. Arguments and result as of
    `pass_at_top_m`.
    """
    check_m(m)
    failing = group_sizes(passed, keys)[1]
    if m > len(failing):
        return pass_at_n(passed)
    samples, wrong = len(passed), failing.total()
    hits = HitCounter(samples, len(failing), m)
    for size in failing.values():
        hits.grow(0, size)
    prefixes = by_size(hits.below_m())
    every = binomials(samples)
    right = samples - wrong
    first = [count * right / (every[drawn] * (samples - drawn)) for drawn, count in enumerate(prefixes) if right]
    return np.cumsum(np.array([*first, *[0.0] * samples])[:samples])


def powers_of_two(most: int) -> list[int]:
    """List 1, 2, 4 and so on up to a number of samples, and that number."""
    return sorted({1 << power for power in range(most.bit_length())} | {most}) if most else []


@lru_cache(maxsize=64)
def binomials(samples: int) -> tuple[int, ...]:
    """C(samples, n) for n = 0..samples."""
    row = [1]
    for n in range(samples):
        row.append(row[-1] * (samples - n) // (n + 1))
    return tuple(row)


class HitCounter:
    """Counts the subsets of growing groups that hit fewer than m groups; m is at least 1.

    The generating function of the subsets of a group of size s, by size (x) and by whether the group is hit (y), is
    ``1 + y ((1 + x)^s - 1)``. Its product over groups is kept as polynomials in ``u = 1 + x``, one for each power of y
    below m: growing a group then costs shifts and sums. All numbers are exact integers. `samples`, the size of the
    pool, bounds the sum of the groups' sizes, and `groups` their number.
    """

    def __init__(self, samples: int, groups: int, m: int):
        # The absolute coefficients of y^j sum to 2^j C(groups, j) at most; sums over them have `samples` terms.
        bound = 4 * (samples + 1) * sum(comb(groups, hits) << hits for hits in range(m))
        self.dtype: Any = np.int64 if bound < 2**62 else object
        self._degree = 0
        self._by_hits = np.zeros((m, samples + 1), dtype=self.dtype)
        self._by_hits[0, 0] = 1

    def grow(self, size: int, to: int) -> None:
        """Let a group of `size` samples (0 for a new one) have `to` samples."""
        self._degree += to - size
        width = self._degree + 1
        others = self._by_hits[0].copy()  # y^j of the product over the other groups
        for hits in range(1, len(self._by_hits)):
            product = self._by_hits[hits]
            before = product.copy()
            product[to:width] += others[: width - to]
            product[size:width] -= others[: width - size]
            if size:
                before[size:width] -= others[: width - size]
                before[:width] += others[:width]
            others = before

    def below_m(self) -> Any:
        """Coefficients in u of the count of subsets that hit fewer than m groups."""
        return self._by_hits[:, : self._degree + 1].sum(axis=0)


def by_size(in_u: Any) -> list[int]:
    """Shift a polynomial in ``u = 1 + x`` to one in x, whose coefficients count subsets by size (Taylor)."""
    shifted = np.array([int(value) for value in in_u], dtype=object)
    for first in range(len(shifted) - 1):
        shifted[first:] = np.add.accumulate(shifted[first:][::-1])[::-1]
    return [int(value) for value in shifted]


def group_sizes(passed: Sequence[bool], keys: Sequence[Hashable]) -> tuple[Counter[Hashable], Counter[Hashable]]:
    """Count the samples of each group that passes, and of each that fails; samples of one key must agree."""
    check_pool(passed, keys)
    passing = Counter(key for key, right in zip(keys, passed) if right)
    failing = Counter(key for key, right in zip(keys, passed) if not right)
    for key in passing:
        if key in failing:
            raise ValueError(
                f"equal samples must have equal verdicts, got {passing[key]} passed and {failing[key]} failed of key "
                f"{str(key)[:40]!r}; the scorer is flaky: score them again, or take the majority with `settle`"
            )
    return passing, failing


def check_pool(passed: Sized, keys: Sized) -> None:
    if not len(passed):
        raise ValueError("a pool must hold at least one sample, got none; leave the task out")
    if len(keys) != len(passed):
        raise ValueError(f"there must be one key a sample, got {len(keys)} keys for {len(passed)} samples")


def checked_scores(scores: Sequence[float | None], samples: int) -> list[float]:
    if len(scores) != samples:
        raise ValueError(f"there must be one score a sample, got {len(scores)} scores for {samples} samples")
    known = [score for score in scores if score is not None and not math.isnan(score)]
    if len(known) < samples:
        raise ValueError(
            f"every sample needs a log-probability to be ranked by, got none for {samples - len(known)} of {samples} "
            "samples; score the samples with the model again, or rank without log-probabilities"
        )
    return known


def check_m(m: int) -> None:
    if m < 1:
        raise ValueError(f"m must be at least 1, got {m}; it counts the candidates that are run")


def check_ns(ns: Sequence[int], samples: int) -> None:
    if out := [n for n in ns if not 1 <= n <= samples]:
        raise ValueError(
            f"n must be between 1 and the pool's {samples} samples, got {out[0]}; draw more samples or leave it out"
        )
