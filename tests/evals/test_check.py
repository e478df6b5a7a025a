"""The checker: what passes, what does not, and that nothing outlives its time limit."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from hf_fastdecode.evals.check import CheckResult, check_completion, check_many, truncate

TASK = {"test_list": ["assert double(2) == 4", "assert double(-3) == -6", "assert double(0) == 0"]}
RIGHT = "def double(x):\n    return 2 * x\n"


def test_right_code_passes_and_the_rest_after_done_is_ignored() -> None:
    assert check_completion(TASK, RIGHT + "[DONE]\nthis is no Python (") == CheckResult(True, "passed")
    assert truncate("a\n[DONE]\nb[DONE]") == "a\n"


@pytest.mark.parametrize(
    "completion",
    [
        "import os\nos._exit(0)",
        "raise SystemExit(0)",
        "print('passed')",
        RIGHT + "print('passed')\nimport os\nos._exit(0)",
        RIGHT + "import sys\nsys.exit()",
        "import sys\nprint(sys.stdin.read())",
        "",
    ],
)
def test_leaving_early_or_saying_passed_is_not_passing(completion: str) -> None:
    assert not check_completion(TASK, completion).passed


@pytest.mark.parametrize(
    ("completion", "reason"),
    [
        ("def double(x):\n    return x", "AssertionError in test 1"),
        ("def double(x):\n    return 2 * abs(x)", "AssertionError in test 2"),
        ("def double(x)", "SyntaxError in program"),
        ("def other(x):\n    return x", "NameError in test 1"),
        ("import os\nos._exit(3)", "ended before its tests did, with exit code 3"),
        ("x = 'a' * 10**11", "MemoryError in program"),
    ],
)
def test_reasons(completion: str, reason: str) -> None:
    assert check_completion(TASK, completion).reason.startswith(reason)


@pytest.mark.parametrize(
    "completion",
    ["while True:\n    pass", "import time\ntime.sleep(60)", RIGHT + "import os\nos.fork()\nwhile True:\n    pass"],
)
def test_endless_programs_are_killed(completion: str) -> None:
    start = time.monotonic()
    assert check_completion(TASK, completion, timeout_s=0.5) == CheckResult(False, "no verdict within 0.5 s")
    assert time.monotonic() - start < 5


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="process groups")
def test_what_a_program_started_ends_with_it(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    child = f"import time; time.sleep(1.5); open({str(mark)!r}, 'w').close()"
    start = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n"
    assert check_completion(TASK, RIGHT + start).passed
    time.sleep(2.5)
    assert not mark.exists()


def test_programs_work_in_a_folder_of_their_own() -> None:
    before = set(os.listdir())
    assert check_completion(TASK, RIGHT + "open('left_behind.txt', 'w').close()").passed
    assert set(os.listdir()) == before


def test_setup_code_runs_after_the_program() -> None:
    task = {"test_list": ["assert six == 6"], "test_setup_code": "six = double(3)"}
    assert check_completion(task, RIGHT).passed


def test_check_many_keeps_the_order() -> None:
    pairs = [(TASK, RIGHT), (TASK, "def double(x): return x"), (TASK, RIGHT + "[DONE]"), (TASK, RIGHT)]
    assert [result.passed for result in check_many(pairs, progress=False)] == [True, False, True, True]
    assert check_many([]) == []


def test_errors_name_value_bound_and_remedy() -> None:
    with pytest.raises(ValueError, match=r"timeout_s must be above 0, got 0"):
        check_completion(TASK, RIGHT, timeout_s=0)
    with pytest.raises(ValueError, match="at least one test, got none"):
        check_completion({"test_list": []}, RIGHT)
