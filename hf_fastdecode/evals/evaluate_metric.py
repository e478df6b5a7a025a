"""pass@n and pass@top-k as a metric of `evaluate`. Importing this takes seconds; the package imports it when asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import evaluate
import numpy as np
from datasets import Features, Value
from datasets import Sequence as ListOf

from .metrics import check_ns, pass_at_n, pass_at_top_m, powers_of_two

_DESCRIPTION: Final = """\
pass@n (some of n samples passes its tests) and pass@top-k (one of the k best-ranked distinct samples among n passes),
both as the exact mean over all subsets of n samples of the pool that is given for each task.
"""

_INPUTS: Final = """
Args:
    predictions: For each task the list of its samples' texts; equal texts are one candidate.
    references: For each task a list that says of each sample whether it passes.
    scores: For each task the list of its samples' scores, higher is better, such as mean log-probabilities.
    k: Candidates that are run, 3 by default.
    ns: Numbers of samples; by default the powers of two up to the smallest pool, and its size.

Returns:
    For each n "pass@{n}" and "pass@top{k} of {n}", means over tasks.
"""

_CITATION: Final = """\
Athiwaratkun et al. 2024, Bifurcated Attention for Single-Context Large-Batch Sampling (arXiv:2403.08845), section 5.4;
Chen et al. 2021, Evaluating Large Language Models Trained on Code (arXiv:2107.03374), equation 1
"""


class PassAtTopK(evaluate.Metric):
    """pass@n and pass@top-k over tasks; a local metric, so that nothing is fetched."""

    def _info(self) -> evaluate.MetricInfo:
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=Features(
                predictions=ListOf(Value("string")), references=ListOf(Value("bool")), scores=ListOf(Value("float64"))
            ),
        )

    def _compute(
        self,
        *,
        predictions: Sequence[Sequence[str]],
        references: Sequence[Sequence[bool]],
        scores: Sequence[Sequence[float]],
        k: int = 3,
        ns: Sequence[int] | None = None,
    ) -> dict[str, Any]:
        smallest = min((len(passed) for passed in references), default=0)
        if not smallest:
            raise ValueError(f"every task needs at least one sample, got {len(references)} tasks, one of them empty")
        ns = powers_of_two(smallest) if ns is None else list(ns)
        check_ns(ns, smallest)
        positions = [n - 1 for n in ns]
        every = np.mean([pass_at_n(passed)[positions] for passed in references], axis=0)
        ranked = [
            pass_at_top_m(passed, score, keys, k)[positions]
            for passed, score, keys in zip(references, scores, predictions, strict=True)
        ]
        found: dict[str, float] = {f"pass@{n}": float(value) for n, value in zip(ns, every)}
        found |= {f"pass@top{k} of {n}": float(value) for n, value in zip(ns, np.mean(ranked, axis=0))}
        return found
