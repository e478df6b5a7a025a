"""PassAtTopK as a metric of `evaluate`, offline."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from hf_fastdecode.evals import metrics

TEXTS = [["a", "b", "a", "c"], ["x", "y", "z", "w", "v"]]
PASSED = [[True, False, True, False], [False, False, True, False, False]]
SCORES = [[-1.0, -2.0, -1.1, -0.5], [-1.0, -1.5, -2.0, -3.0, -4.0]]
ROOT = Path(__file__).parents[3]


@pytest.fixture
def metric(tmp_path):
    return metrics.PassAtTopK(cache_dir=str(tmp_path))


def test_means_over_tasks(metric):
    found = metric.compute(predictions=TEXTS, references=PASSED, scores=SCORES, k=2, ns=[1, 3])
    columns = list(zip(PASSED, SCORES, TEXTS))
    assert found == {
        "pass@1": np.mean([metrics.pass_at_n(passed)[0] for passed in PASSED]),
        "pass@3": np.mean([metrics.pass_at_n(passed)[2] for passed in PASSED]),
        "pass@top2 of 1": np.mean([metrics.pass_at_top_m(*column, 2)[0] for column in columns]),
        "pass@top2 of 3": np.mean([metrics.pass_at_top_m(*column, 2)[2] for column in columns]),
    }
    assert found["pass@top2 of 3"] < found["pass@3"]


def test_defaults_and_batches(metric):
    for texts, passed, scores in zip(TEXTS, PASSED, SCORES):
        metric.add(prediction=texts, reference=passed, scores=scores)
    found = metric.compute()
    assert list(found) == [
        *("pass@1", "pass@2", "pass@4"),
        *("pass@top3 of 1", "pass@top3 of 2", "pass@top3 of 4"),
    ]
    assert found == metric.compute(predictions=TEXTS, references=PASSED, scores=SCORES, k=3)


def test_says_what_it_takes(metric):
    assert list(metric.features) == ["predictions", "references", "scores"]
    assert "pass@top-k" in metric.description
    assert "mean log-probabilities" in metric.inputs_description
    assert "Bifurcated Attention" in metric.citation


def test_errors(metric):
    with pytest.raises(ValueError, match="smallest pool's 4 samples, got 5"):
        metric.compute(predictions=TEXTS, references=PASSED, scores=SCORES, ns=[5])
    with pytest.raises(ValueError, match="one of them empty"):
        metric.compute(predictions=[[]], references=[[]], scores=[[]])
    with pytest.raises(ValueError, match=r"inputs are missing: \['scores'\]"):
        metric.compute(predictions=TEXTS, references=PASSED)


def test_importing_the_metrics_imports_nothing_slow():
    code = (
        "import sys, hf_fastdecode.evals.metrics as metrics\n"
        "print(sorted({'datasets', 'evaluate', 'matplotlib', 'torch', 'transformers'} & set(sys.modules)))\n"
        "print('PassAtTopK' in vars(metrics))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "False"]
    with pytest.raises(AttributeError, match="has no attribute 'pass_at_top'"):
        metrics.pass_at_top  # noqa: B018
