"""Scoring samples: order, equal programs, retries, and what is refused."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from types import TracebackType
from typing import Self

import pytest

from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox, SandboxError, choose
from hf_fastdecode.evals.scoring import LANGUAGES, LanguageSupport, Result, score
from hf_fastdecode.evals.scoring.python.job import job_of
from hf_fastdecode.evals.scoring.runner import BrokenServerError, command_version

from ..processes import running

TASKS = {name: Task(name, "python", "", "", ("assert f() == 1",)) for name in ("a", "b")}
NONE = choose("none", allow_unsafe=True)


class Scripted:
    """A runner that gives results from a list per completion, one after another.

    Attributes:
        scripts: By completion; the last result stays.
        seen: Completion, thread and limit on wall-clock time of each check.
    """

    scripts: dict[str, list[Result | Exception]]
    seen: list[tuple[str, int, float]]

    def __init__(self, sandbox: Sandbox, limits: Limits):
        self.limits = limits

    def check(self, task: Task, completion: str) -> Result:
        done = sum(text == completion for text, _, _ in self.seen)
        self.seen.append((completion, threading.get_ident(), self.limits.wall_seconds))
        script = self.scripts.get(completion, [Result("pass")])
        result = script[min(done, len(script) - 1)]
        if isinstance(result, Exception):
            raise result
        return result

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Result | Exception]]:
    """What the runner answers."""
    Scripted.scripts, Scripted.seen = {}, []
    support = LanguageSupport(runner=Scripted, limits=Limits(wall_seconds=3), check_task=job_of)
    monkeypatch.setitem(LANGUAGES, "python", support)
    return Scripted.scripts


def test_verdicts_are_in_the_order_of_samples(any_sandbox: Sandbox) -> None:
    texts = ["def f(): return 1", "def f(): return 2", "def f(", "def f(): return 1"]
    samples = [Sample(task, index, text) for task in "ba" for index, text in enumerate(texts)]
    verdicts = score(TASKS, samples, sandbox=any_sandbox, workers=2, progress=False)
    assert [(one.task_id, one.index) for one in verdicts] == [(one.task_id, one.index) for one in samples]
    assert [one.status for one in verdicts] == ["pass", "fail", "compile", "pass"] * 2
    assert score(TASKS, [], sandbox=any_sandbox, progress=False) == []


def test_equal_programs_of_a_task_run_once(scripts: dict[str, list[Result | Exception]]) -> None:
    samples = [Sample(task, index, text) for task in "ab" for index, text in enumerate("xyxx")]
    score(TASKS, samples, sandbox=NONE, progress=False)
    assert Counter(text for text, _, _ in Scripted.seen) == {"x": 2, "y": 2}


def test_what_a_busy_machine_may_have_caused_runs_again_alone(scripts: dict[str, list[Result | Exception]]) -> None:
    scripts |= {
        "slow": [Result("timeout", "at first", load=True), Result("pass")],
        "slower": [Result("timeout", "at first", load=True), Result("timeout", "then", load=True)],
        "endless": [Result("timeout", "by CPU time")],
        "broken once": [SandboxError("no sandbox"), Result("fail", "wrong")],
        "broken": [SandboxError("no sandbox")],
    }
    samples = [Sample("a", index, text) for index, text in enumerate([*scripts, "quick"])]
    verdicts = score(TASKS, samples, sandbox=NONE, workers=3, progress=False)
    assert [(one.status, one.detail) for one in verdicts] == [
        ("pass", ""),
        ("timeout", "then"),
        ("timeout", "by CPU time"),
        ("fail", "wrong"),
        ("sandbox_error", "no sandbox"),
        ("pass", ""),
    ]
    first, again = Scripted.seen[: len(samples)], Scripted.seen[len(samples) :]
    assert {wall for _, _, wall in first} == {3}
    assert {wall for _, _, wall in again} == {12}
    assert [text for text, _, _ in again] == ["slow", "slower", "broken once", "broken", "broken"]


def test_what_breaks_the_tests_counts_where_they_are_known_to_work(
    scripts: dict[str, list[Result | Exception]],
) -> None:
    by_itself, by_load = Result("memory", "too much"), Result("timeout", "waited", load=True)
    scripts |= {
        "bad": [BrokenServerError(by_itself)],
        "starved": [BrokenServerError(by_load)],
        "wrong": [Result("fail")],
    }
    scripts["bad once"] = [BrokenServerError(by_itself), Result("pass")]
    for reference, beside, expected in (
        (None, "right", ["memory", "timeout"]),
        (None, "wrong", ["memory", "sandbox_error"]),
        ("right", "wrong", ["memory", "timeout"]),
        ("wrong", "wrong", ["memory", "sandbox_error"]),
        ("bad", "wrong", ["sandbox_error", "sandbox_error"]),
    ):
        tasks = {"a": replace(TASKS["a"], reference=reference)}
        samples = [Sample("a", index, text) for index, text in enumerate(["bad", "starved", beside])]
        verdicts = score(tasks, samples, sandbox=NONE, progress=False)
        assert [one.status for one in verdicts[:2]] == expected, (reference, beside)
    assert score(TASKS, [Sample("a", 0, "bad once")], sandbox=NONE, progress=False)[0].passed


def test_given_limits_replace_those_of_the_language(scripts: dict[str, list[Result | Exception]]) -> None:
    score(TASKS, [Sample("a", 0, "x")], sandbox=NONE, limits=Limits(wall_seconds=7), progress=False)
    assert [wall for _, _, wall in Scripted.seen] == [7]


def test_an_error_ends_the_run(scripts: dict[str, list[Result | Exception]]) -> None:
    scripts["bad"] = [ValueError("the tests of task a are not valid Python")]
    samples = [Sample("a", index, text) for index, text in enumerate(["bad", *map(str, range(100))])]
    with pytest.raises(ValueError, match="tests of task a"):
        score(TASKS, samples, sandbox=NONE, workers=2, progress=False)
    assert len(Scripted.seen) < 100


def test_ctrl_c_ends_the_run_at_once_and_leaves_nothing(any_sandbox: Sandbox) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
from hf_fastdecode.evals.records import Sample
from hf_fastdecode.evals.sandbox import choose
from hf_fastdecode.evals.scoring import score
from hf_fastdecode.evals.records import Task
texts = [f"import os\\nos.execv('/bin/sleep', ['{mark}', '{{seconds}}'])" for seconds in (60, 61, 62, 63)]
samples = [Sample("a", index, text) for index, text in enumerate(texts)]
sandbox = choose({any_sandbox.name!r})
print("ready", flush=True)
score({{"a": Task("a", "python", "", "", ("assert f()",))}}, samples, sandbox=sandbox, workers=2, progress=False)
"""
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        until = time.monotonic() + 20
        while not running(mark):
            assert time.monotonic() < until
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        start = time.monotonic()
        assert b"KeyboardInterrupt" in process.communicate(timeout=20)[1]
    assert time.monotonic() - start < 5
    until = time.monotonic() + 5
    while running(mark):
        assert time.monotonic() < until, "a sandbox outlived its host"
        time.sleep(0.05)


def test_tasks_are_checked_before_anything_runs(scripts: dict[str, list[Result | Exception]]) -> None:
    tasks = {**TASKS, "empty": Task("empty", "python", "", "", ())}
    samples = [Sample("a", 0, "x"), Sample("empty", 0, "y")]
    with pytest.raises(ValueError, match="task empty has no tests; every program would pass"):
        score(tasks, samples, sandbox=NONE, progress=False)
    assert Scripted.seen == []


def test_scoring_does_not_import_torch() -> None:
    code = "import sys, hf_fastdecode.evals.scoring; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_tasks_and_missing_toolchains(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="1 samples' tasks are unknown, such as 'c'"):
        score(TASKS, [Sample("a", 0, ""), Sample("c", 0, "")], sandbox=NONE, progress=False)
    support = LanguageSupport(runner=Scripted, limits=Limits(), missing=lambda: "needs a compiler; apt install one")
    monkeypatch.setitem(LANGUAGES, "python", support)
    with pytest.raises(SandboxError, match="needs a compiler; apt install one"):
        score(TASKS, [Sample("a", 0, "")], sandbox=NONE, progress=False)


def test_versions_of_languages() -> None:
    assert LANGUAGES["python"].version() == platform.python_version()
    for language, command in (("javascript", "node"), ("java", "java")):
        version = LANGUAGES[language].version()
        assert bool(version) == bool(shutil.which(command))
        assert "\n" not in version
    assert command_version("no-such-command") == ""
