"""Pools of judged samples, rankers, votes, and the metric of `evaluate`."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hf_fastdecode.evals import metrics
from hf_fastdecode.evals.metrics import (
    RANKERS,
    Pool,
    ast_key,
    build_pools,
    pass_at_first_m,
    pass_at_n,
    pass_at_ranker,
    pass_at_top_m,
    pass_at_votes,
)
from hf_fastdecode.evals.records import Sample, Verdict

from .run_folders import votes_by_hand

POOL = Pool(
    "t",
    passed=(True, False, False, True),
    keys=("a", "b", "c", "a"),
    outputs=(None, None, None, None),
    mean_logp=(-2.0, -1.0, -1.5, -0.5),
    sum_logp=(-4.0, -9.0, -3.0, -2.0),
)


def samples_of(task_id: str, *texts: str) -> list[Sample]:
    return [Sample(task_id, index, text, tokens=2, sum_logp=-1.0 - index) for index, text in enumerate(texts)]


def test_columns_are_joined_by_task_and_index():
    samples = samples_of("1", "x", "y", "x") + samples_of("2", "z")
    verdicts = [Verdict("1", index, status) for index, status in enumerate(("pass", "timeout", "pass"))]
    (pool, other), left_out = build_pools(samples[::-1], [*verdicts, Verdict("2", 0, "fail")])
    pool, other = (other, pool) if pool.task_id == "2" else (pool, other)
    assert (pool.passed, pool.keys, pool.mean_logp) == ((True, False, True), ("x", "y", "x"), (-1.5, -1.0, -0.5))
    assert left_out == 0


def test_what_was_not_judged_is_left_out():
    samples = samples_of("1", "x", "y", "z") + samples_of("2", "x")
    verdicts = [Verdict("1", 0, "sandbox_error"), Verdict("1", 1, "pass"), Verdict("2", 0, "sandbox_error")]
    pools, left_out = build_pools(samples, verdicts)
    assert [(pool.task_id, pool.passed) for pool in pools] == [("1", (True,))]
    assert left_out == 3


def test_bodies_of_another_indentation_are_no_duplicates():
    """After a docstring that is indented by four, one of them does not compile."""
    assert ast_key("    return 1") == ast_key("\n    return (1)  # one")
    assert ast_key("    return 1") != ast_key("  return 1")


def test_the_last_verdict_counts():
    verdicts = [Verdict("1", 0, "sandbox_error"), Verdict("1", 0, "pass")]
    assert build_pools(samples_of("1", "x"), verdicts)[0][0].passed == (True,)


def test_files_of_different_runs_are_refused():
    samples = samples_of("1", "x")
    with pytest.raises(ValueError, match="names sample 3 of task '1', which is not among the samples"):
        build_pools(samples, [Verdict("1", 3, "pass")])
    with pytest.raises(ValueError, match="sample 0 of task '1' is there twice"):
        build_pools([*samples, replace(samples[0], completion="other")], [])
    assert build_pools([*samples, *samples], [Verdict("1", 0, "pass")])[0][0].passed == (True,)


def test_a_completion_without_tokens_comes_last():
    samples = [Sample("1", 0, "", tokens=0, sum_logp=0.0), Sample("1", 1, "x", 3, -9.0), Sample("1", 2, "y")]
    (pool,), _ = build_pools(samples, [Verdict("1", index, "fail") for index in range(3)])
    assert pool.mean_logp == (-np.inf, -3.0, None)
    assert pool.sum_logp == (-np.inf, -9.0, None)


def test_flaky_verdicts_are_settled_by_majority():
    pool = replace(POOL, keys=("a", "a", "a", "b"), passed=(True, False, True, True))
    settled, changed = pool.settle()
    assert (settled.passed, changed) == ((True, True, True, True), 1)
    settled, changed = replace(pool, keys=("a", "a", "b", "b")).settle()
    assert (settled.passed, changed) == ((False, False, True, True), 1)
    assert POOL.settle() == (POOL, 0)
    with pytest.raises(ValueError, match="task 't': equal samples must have equal verdicts"):
        pass_at_ranker(pool, "mean_logp", [1])


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("def f(a):\n    return a\n", "def f(a):  # the same\n\n    return (a)\n", True),
        ("def f(a):\n    return a\n", "def f(b):\n    return b\n", False),
        ("    return a\n", "    return  (a)  # as the body of a function\n", True),
        ("    return a\n", "    return b\n", False),
        ("'a' + \"b\"", "\"a\" + 'b'", True),
        ("int f() { return 1; }", "int f() { return  1; }", False),
        ("x = '\\d'", "x = '\\\\d'", True),
        ("\0", "\0\0", False),
        ("((((", "((((", True),
    ],
)
@pytest.mark.filterwarnings("error")
def test_syntax_trees_as_keys(one, other, same):
    assert (ast_key(one) == ast_key(other)) is same
    assert (ast_key(one) == ast_key("-" * 100_000 + "1")) is False


def test_rankers_by_name():
    ns, m = [1, 3, 4], 1
    positions = [n - 1 for n in ns]
    expected = {
        "oracle": pass_at_n(POOL.passed),
        "mean_logp": pass_at_top_m(POOL.passed, POOL.mean_logp, POOL.keys, m),
        "sum_logp": pass_at_top_m(POOL.passed, POOL.sum_logp, POOL.keys, m),
        "random": pass_at_first_m(POOL.passed, POOL.keys, m),
    }
    assert set(RANKERS) == {*expected, "votes"}
    for ranker, values in expected.items():
        found, errors = pass_at_ranker(POOL, ranker, ns, m=m)
        assert list(found) == list(values[positions])
        assert errors is None
    found, errors = pass_at_ranker(POOL, "votes", [4], m=1)
    assert (found[0], errors[0]) == (1.0, 0.0)
    assert len({tuple(map(float, values)) for values in expected.values()}) == 4


def test_votes_are_over_outputs_where_these_are_known():
    """Two equal texts give a wrong answer; two other programs, each in words of its own, agree on the right one."""
    pool = Pool(
        "t",
        passed=(False, False, False, False, True, True),
        keys=("a", "a", "b", "c", "d", "e"),
        outputs=("7", "7", "8", None, "9", "9"),
        mean_logp=(None,) * 6,
        sum_logp=(None,) * 6,
    )
    (by_output,), _ = pass_at_ranker(pool, "votes", [6], m=2)
    (by_text,), _ = pass_at_ranker(replace(pool, outputs=(None,) * 6), "votes", [6], m=1)
    assert (by_output, by_text) == (1.0, 0.0)
    flaky = replace(pool, outputs=("9", "9", "8", None, "9", "9"))
    assert pass_at_ranker(flaky, "votes", [6], m=2)[0][0] == 1.0


def test_a_sample_without_outputs_votes_for_its_text():
    """Else a wrong one that has outputs would win over any number of right ones that have none."""
    pool = Pool(
        "t",
        passed=(True, True, True, False),
        keys=("a", "a", "b", "c"),
        outputs=(None, None, None, "7"),
        mean_logp=(None,) * 4,
        sum_logp=(None,) * 4,
    )
    assert pass_at_ranker(pool, "votes", [4], m=1)[0][0] == 1.0
    three_ways = replace(pool, keys=("a", "b", "c", "d"))
    assert pass_at_ranker(three_ways, "votes", [4], m=1)[0][0] == pytest.approx(3 / 4)
    wrong = replace(pool, passed=(False, False, True, True), outputs=(None, None, "7", "7"))
    assert pass_at_ranker(wrong, "votes", [4], m=1)[0][0] == pytest.approx(1 / 2), (
        "nobody knows that the text is wrong"
    )


def test_outputs_of_verdicts_are_joined():
    samples = samples_of("1", "x", "y")
    (pool,), _ = build_pools(samples, [Verdict("1", 0, "pass", outputs="ab"), Verdict("1", 1, "fail")])
    assert pool.outputs == ("ab", None)


def test_errors_name_the_task():
    with pytest.raises(ValueError, match="task 't': n must be between 1 and the pool's 4 samples, got 5; draw more"):
        pass_at_ranker(POOL, "oracle", [1, 5])
    with pytest.raises(ValueError, match=r"task 't': every sample needs a log-probability.*got none for 1 of 4"):
        pass_at_ranker(replace(POOL, mean_logp=(None, -1.0, -1.0, -1.0)), "mean_logp", [1])
    with pytest.raises(ValueError, match=r"must be one of oracle, mean_logp, .*got 'best'"):
        pass_at_ranker(POOL, "best", [1])


OUTPUTS = [1, 1, 2, 2, 3, 4, 5, 5]
VERDICTS = [True, True, False, False, True, False, False, False]


@pytest.mark.parametrize("m", [1, 2, 3, 9])
@pytest.mark.parametrize("seed", [0, 1])
def test_estimates_agree_with_enumeration(m, seed):
    ns = range(1, len(OUTPUTS) + 1)
    found, errors = pass_at_votes(VERDICTS, OUTPUTS, ns, m=m, draws=4000, seed=seed)
    exact = votes_by_hand(VERDICTS, OUTPUTS, m)
    assert (np.abs(found - exact) <= 4.5 * errors + 1e-12).all()
    assert errors.max() < 0.5 / 4000**0.5 + 1e-4


def test_a_seed_fixes_the_draws():
    first, again, other = (pass_at_votes(VERDICTS, OUTPUTS, [3], draws=50, seed=seed)[0][0] for seed in (3, 3, 4))
    assert first == again != other


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ns": [0]}, "between 1 and the pool's 8 samples, got 0"),
        ({"ns": [9]}, "between 1 and the pool's 8 samples, got 9"),
        ({"m": 0}, "m must be at least 1"),
        ({"outputs": [1] * 8}, "equal verdicts, got 3 passed and 5 failed"),
        ({"passed": [], "outputs": []}, "at least one sample"),
    ],
)
def test_errors_name_value_bound_and_remedy(change, message):
    given = {"passed": VERDICTS, "outputs": OUTPUTS, "ns": [1]} | change
    with pytest.raises(ValueError, match=message):
        pass_at_votes(**given)


def test_more_candidates_than_answers_are_no_more_work():
    found, _ = pass_at_votes(VERDICTS, OUTPUTS, [3], m=10**9, draws=50)
    assert 0 < found[0] <= 1


TEXTS = [["a", "b", "a", "c"], ["x", "y", "z", "w", "v"]]
PASSED = [[True, False, True, False], [False, False, True, False, False]]
SCORES = [[-1.0, -2.0, -1.1, -0.5], [-1.0, -1.5, -2.0, -3.0, -4.0]]
ROOT = Path(__file__).parents[2]


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
    assert list(found) == [*("pass@1", "pass@2", "pass@4"), *("pass@top3 of 1", "pass@top3 of 2", "pass@top3 of 4")]
    assert found == metric.compute(predictions=TEXTS, references=PASSED, scores=SCORES, k=3)


def test_says_what_it_takes(metric):
    assert list(metric.features) == ["predictions", "references", "scores"]
    assert "pass@top-k" in metric.description
    assert "mean log-probabilities" in metric.inputs_description
    assert "Bifurcated Attention" in metric.citation


def test_errors(metric):
    with pytest.raises(ValueError, match="pool's 4 samples, got 5"):
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
