"""The report of a run folder: accuracy, latency, and how they are joined."""

from __future__ import annotations

import json
import math
from dataclasses import astuple, replace

import pytest

from hf_fastdecode.errors import InputError
from hf_fastdecode.evals.records import Latency, Sample, Verdict
from hf_fastdecode.evals.report import accuracy_within, fastest, largest_n_within, points, read_latency, report
from hf_fastdecode.evals.report_files import accuracy_table

from .run_folders import CPU, TASKS, full_run, latency, samples, verdicts, write_latency, write_run


@pytest.fixture
def run(tmp_path):
    return full_run(tmp_path / "run")


def test_figures_by_hand(run):
    accuracy = report(run, m=1).accuracy
    assert accuracy.ns == (1, 2, 4)
    by_hand = {
        "oracle": [(1 / 2 + 1 / 4) / 3, (5 / 6 + 1 / 2) / 3, 2 / 3],
        # Of two samples of the first task, the better one is right unless it is "b"; of the second, if "x" is drawn.
        "mean_logp": [(1 / 2 + 1 / 4) / 3, (3 / 6 + 1 / 2) / 3, (0 + 1) / 3],
        # One of two distinct texts in the order drawn is as good as one sample.
        "random": [(1 / 2 + 1 / 4) / 3] * 3,
    }
    for ranker, values in by_hand.items():
        assert accuracy.curves[ranker].values == pytest.approx(values)
        assert accuracy.curves[ranker].errors is None
    assert accuracy.curves["sum_logp"].values == accuracy.curves["mean_logp"].values
    votes = accuracy.curves["votes"]
    assert votes.values[-1] == pytest.approx(1 / 3)
    assert votes.errors[0] == votes.errors[-1] == 0 < votes.errors[1] < 0.02  # one sample, and all, are no estimate
    assert accuracy.statuses == {"fail": 9, "pass": 3}
    assert [(task.samples, task.passed, task.distinct, task.distinct_passed) for task in accuracy.tasks] == [
        (4, 2, 3, 1),
        (4, 1, 3, 1),
        (4, 0, 3, 0),
    ]


def test_intervals_contain_the_means_and_follow_the_seed(run):
    first, again, other = (report(run, seed=seed).accuracy for seed in (1, 1, 2))
    assert first == again
    for curve in first.curves.values():
        assert all(low <= value <= high for low, value, high in zip(curve.lows, curve.values, curve.highs))
        assert curve.lows[-1] < curve.highs[-1]
    assert first.curves["votes"].values != other.curves["votes"].values
    assert first.curves["oracle"].values == other.curves["oracle"].values


def test_which_ns_are_shown(tmp_path):
    tasks = {name: rows * 2 for name, rows in TASKS.items()}
    timed = latency((1, 3, 7, 64))
    run = write_run(tmp_path, samples=samples(tasks), verdicts=verdicts(tasks), latency=timed)
    assert report(run).accuracy.ns == (1, 2, 3, 4, 7, 8)
    assert report(run, ks=[5, 1, 5]).accuracy.ns == (1, 5)
    with pytest.raises(InputError, match="between 1 and the 8 judged samples of the smallest pool, got 9"):
        report(run, ks=[1, 9])


def test_accuracy_and_latency_are_joined_by_n(run):
    found = report(run)
    shared, stock = found.lines
    assert (shared.label, stock.label) == ("hf_fastdecode, eager", "transformers, eager")
    oracle = dict(zip(found.accuracy.ns, found.accuracy.curves["oracle"].values))
    assert points(found.accuracy, "oracle", shared) == [(n, 1 + 0.05 * n, oracle[n]) for n in (1, 2, 4)]
    assert [row.n for row in stock.rows] == [1, 2, 4]
    assert [(step.seconds, step.n, step.value) for step in accuracy_within(found.accuracy, "oracle", stock)] == [
        (1 + 0.55 * n, n, oracle[n]) for n in (1, 2, 4)
    ]


def test_a_budget_buys_the_best_n_that_is_in_time(run):
    # n = 4 is there before n = 2, which then adds nothing; ranked by one candidate, n = 4 is no better than n = 2.
    rows = latency((1, 2, 4))
    rows = [replace(row, last_sample_s=9.0) if row.n == 2 else row for row in rows]
    write_latency(run / "latency.csv", rows)
    found = report(run, m=1)
    shared = found.lines[0]
    assert [step.n for step in accuracy_within(found.accuracy, "oracle", shared)] == [1, 4]
    values = dict(zip(found.accuracy.ns, found.accuracy.curves["mean_logp"].values))
    assert values[1] < values[2] == values[4]
    assert [step.n for step in accuracy_within(found.accuracy, "mean_logp", shared)] == [1, 4]


def test_samples_within_twice_the_latency_of_one():
    from hf_fastdecode.evals.report import lines_of

    shared, stock = lines_of(latency((1, 2, 4, 16, 32)))
    assert (largest_n_within(shared), largest_n_within(stock)) == (16, 2)
    assert largest_n_within(lines_of(latency((2, 4)))[0]) is None


def test_the_mode_that_stands_for_a_way():
    from hf_fastdecode.evals.report import lines_of

    lines = lines_of(latency(modes=("eager", "graph")))
    assert fastest(lines, "shared", CPU).mode == "graph"
    short = [row for row in latency(modes=("eager", "graph")) if row.mode == "eager" or row.n < 8]
    assert fastest(lines_of(short), "shared", CPU).mode == "eager"
    assert fastest(lines, "stock", "other") is None


def test_without_latency(tmp_path):
    found = report(write_run(tmp_path, samples=samples(), verdicts=verdicts()))
    assert found.latency == ()
    assert found.lines == []
    assert found.accuracy.ns == (1, 2, 4)
    assert found.title == "3 tasks, 4 samples of each"


def test_without_verdicts(tmp_path):
    found = report(write_run(tmp_path, samples=samples(), latency=latency()))
    assert found.accuracy is None
    assert len(found.latency) == 8
    assert found.title == "latency"
    assert found.notes == (f"stock, eager on {CPU}: out of memory at n = 8",)
    write_latency(tmp_path / "latency.csv", latency(), model="shape:7b-mha", task="mbpp", commit="abc")
    assert report(tmp_path).title == "model shape:7b-mha; task mbpp"


def test_torn_last_lines_are_ignored(run):
    whole = report(run)
    for name in ("samples.jsonl", "verdicts.jsonl"):
        with (run / name).open("a") as file:
            file.write('{"task_id": "MBPP/3", "ind')
    assert report(run) == whole


def test_remarks(tmp_path):
    judged = verdicts()
    judged[-1] = replace(judged[-1], status="sandbox_error")
    judged[2] = replace(judged[2], status="timeout")  # of two equal samples, one passed
    drawn = [*samples(), Sample("lost", 0, "x", 1, -1.0)]
    found = report(write_run(tmp_path, samples=drawn, verdicts=judged))
    assert found.notes == (
        "2 of 13 samples have no verdict and are left out, and with them 1 task",
        "Tasks have between 3 and 4 judged samples; n goes up to 3",
        "Equal samples have different verdicts, so the scoring is flaky; 1 were changed to those of the majority, a "
        "tie counting as failed",
    )
    assert found.accuracy.statuses == {"fail": 8, "pass": 2, "timeout": 1, "sandbox_error": 1}
    assert found.accuracy.value("oracle", 1) == pytest.approx((0 + 1 / 4 + 0) / 3)


def test_thoughts_are_told(tmp_path):
    thinking = [replace(one, tokens=9, thought_tokens=9 if one.index == 0 else 4) for one in samples()]
    found = report(write_run(tmp_path, samples=thinking, verdicts=verdicts()))
    cut = sum(one.index == 0 for one in thinking)
    assert f"Samples think first, 4 tokens in the median; {cut} of 12 did not reach an answer" in found.notes[0]


def test_unjudged_samples_give_bounds(tmp_path):
    judged = [replace(one, status="unjudged") if one.task_id == "MBPP/3" else one for one in verdicts()]
    found = report(write_run(tmp_path, samples=samples(), verdicts=judged))
    lost = sum(one.status == "unjudged" for one in judged)
    assert found.accuracy.statuses["unjudged"] == lost > 0
    assert f"{lost} samples of 1 task cannot be judged: they count as failed, and in the column" in found.notes[0]
    failed = [replace(one, status="fail") if one.status == "unjudged" else one for one in judged]
    passed = [replace(one, status="pass") if one.status == "unjudged" else one for one in judged]
    runs = {"low": failed, "high": passed}
    low, high = (
        report(write_run(tmp_path / name, samples=samples(), verdicts=one)).accuracy for name, one in runs.items()
    )
    assert found.accuracy.curves == low.curves
    assert low.at_most is None
    assert found.accuracy.at_most == high.curves["oracle"]
    head, rows = accuracy_table(found.accuracy)
    assert head[:3] == ["n", "pass@n", "pass@n,\nat most"]
    assert rows[0][2].startswith(f"{100 * high.value('oracle', 1):.1f}%")


@pytest.mark.parametrize("passed", [True, False])
def test_one_task_all_alike(tmp_path, passed):
    tasks = {"1": [("x", -1.0, passed), ("y", -2.0, passed)]}
    found = report(write_run(tmp_path, samples=samples(tasks), verdicts=verdicts(tasks)))
    assert found.notes == ("A single task gives no interval over tasks.",)
    for curve in found.accuracy.curves.values():
        assert curve.values == (passed, passed)
        assert all(low != low for low in curve.lows)


def test_duplicates_by_syntax_tree(tmp_path):
    tasks = {"1": [("x = 1", -1.0, False), ("x  =  1", -1.5, False), ("x = 2", -2.0, True)]}
    run = write_run(tmp_path, samples=samples(tasks), verdicts=verdicts(tasks))
    assert report(run, m=2).accuracy.value("mean_logp", 3) == 0
    assert report(run, m=2, deduplicate="ast").accuracy.value("mean_logp", 3) == 1


def test_without_log_probabilities(tmp_path):
    unknown = [replace(sample, sum_logp=None) if sample.index == 1 else sample for sample in samples()]
    run = write_run(tmp_path, samples=unknown, verdicts=verdicts())
    with pytest.raises(InputError, match=r"pass@top3 ranks by log-probabilities, which 3 of 12 judged samples lack"):
        report(run)
    found = report(run, m=None)
    assert list(found.accuracy.curves) == ["oracle"]
    assert "Samples were not ranked." in found.notes


def test_settings_are_kept(run):
    found = report(run, m=2, seed=5)
    assert found.settings["m"] == 2
    assert found.settings["seed"] == 5
    assert found.settings["run"]["temperature"] == 0.8
    assert found.title == "model m & <i>n</i>; task mbpp; 3 tasks, 4 samples of each"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "neither verdicts.jsonl nor latency.csv; sample and score"),
        ({"samples": samples()}, "neither verdicts.jsonl nor latency.csv"),
        ({"verdicts": verdicts()}, "has verdicts.jsonl but not samples.jsonl"),
        ({"samples": [], "verdicts": []}, "none of 0 samples has a verdict"),
        ({"samples": samples(), "verdicts": []}, "none of 12 samples has a verdict; score them, or remove"),
        ({"samples": samples(), "verdicts": [Verdict("other", 0, "pass")]}, "sample 0 of task 'other', which is not"),
        ({"samples": samples(), "verdicts": verdicts(), "settings": [1]}, "must hold a JSON object, got a list"),
    ],
)
def test_what_is_refused(tmp_path, files, message):
    with pytest.raises(InputError, match=message):
        report(write_run(tmp_path, **files))


def test_numbers_out_of_bounds(run):
    with pytest.raises(InputError, match="m must be at least 1, got 0"):
        report(run, m=0)
    (run / "settings.json").write_text("{")
    with pytest.raises(InputError, match=r"settings.json is not JSON: .*; mend or remove it"):
        report(run)


def test_metrics_are_json_with_nulls(tmp_path):
    from hf_fastdecode.evals.report_files import write_report

    tasks = {"1": [("x", -1.0, True)]}
    found = report(write_run(tmp_path, samples=samples(tasks), verdicts=verdicts(tasks), latency=latency((1,))))
    read = json.loads(write_report(found, tmp_path)[0].read_text())
    assert read["accuracy"]["curves"]["oracle"] == {
        "label": "pass@n",
        "values": [1.0],
        "low": [None],
        "high": [None],
        "monte_carlo_standard_error": None,
    }
    assert read["latency"][0]["ms_per_step_p90"] is None
    assert read["largest_n_within_twice_the_latency_of_one"][0] == {
        "device": CPU,
        "way": "shared",
        "mode": "eager",
        "n": 1,
    }


ROW = Latency("shared", "graph", 4, 'H200, "x"', 0.1, 2.0, 2.5, 1.0, 1.5, 2.0, 1.1, 1.6, 2.2, 1 << 33, 5)
HEAD = "way,mode,n,device,last_sample_s\n"


def plain(row):
    return ["unknown" if value != value else value for value in astuple(row)]


def test_rows_come_back_sorted(tmp_path):
    path = tmp_path / "new" / "latency.csv"
    failed = Latency("stock", "eager", 16, "H200", status="out of memory")
    sparse = Latency("stock", "eager", 2, "H200", last_sample_s=0.1)
    fast = Latency("stock", "eager", 8, "H200", last_sample_s=0.2)
    write_latency(path, [failed, fast, sparse, ROW], commit="abc", torch="2")
    assert [plain(row) for row in read_latency(path)] == [plain(row) for row in (sparse, fast, failed, ROW)]


def test_of_two_ways_that_ran_in_the_same_mode_the_later_with_numbers_counts(tmp_path):
    path = tmp_path / "latency.csv"
    head = HEAD.replace("\n", ",status\n")
    lines = ["shared,graph,1,CPU,1.5,ok", "shared:graph,graph,1,CPU,1.25,ok", "shared:eager,eager,1,CPU,2,ok"]
    path.write_text(head + "\n".join([*lines, "shared,eager,1,CPU,,out of memory"]) + "\n")
    assert [(row.way, row.mode, row.last_sample_s) for row in read_latency(path)] == [
        ("shared", "eager", 2.0),
        ("shared", "graph", 1.25),
    ]


def test_a_file_in_another_encoding(tmp_path):
    path = tmp_path / "latency.csv"
    path.write_bytes(HEAD.encode("utf-16"))
    with pytest.raises(InputError, match="is not a table of `eval latency`"):
        read_latency(path)


def test_few_columns_are_enough(tmp_path):
    path = tmp_path / "latency.csv"
    path.write_text(HEAD + "shared,eager,1,CPU,1.5\n")
    (row,) = read_latency(path)
    assert (row.last_sample_s, row.runs, row.peak_bytes, row.status) == (1.5, 0, None, "ok")
    assert math.isnan(row.prefill_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("way,mode,n\nstock,eager,1\n", "is not a table of `eval latency` .'device'."),
        (HEAD + "ours,eager,1,CPU,1.5\n", "no way, mode and number of samples: ours, eager, 1"),
        (HEAD + "shared,fast,1,CPU,1.5\n", "no way, mode and number of samples: shared, fast, 1"),
        (HEAD + "shared,eager,x,CPU,1.5\n", "'x'"),
        (HEAD + "shared,eager,0,CPU,1.5\n", "shared, eager, 0"),
        (HEAD + "shared,eager,,CPU,1.5\n", "'n'"),
        (HEAD + "shared,eager,1,CPU,soon\n", "'soon'"),
        (HEAD + "shared,eager,1,CPU,\n", "last_sample_s is nan at n = 1"),
        (HEAD + "shared,eager,1,CPU,0\n", "last_sample_s is 0.0"),
        (HEAD + "shared,eager,1,CPU,inf\n", "last_sample_s is inf"),
    ],
)
def test_tables_of_another_kind(tmp_path, text, message):
    path = tmp_path / "latency.csv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        read_latency(path)
