"""Scoring into a file: one line a sample in the end, interruptions, and what makes a verdict obsolete."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hf_fastdecode.errors import InputError
from hf_fastdecode.evals import scoring
from hf_fastdecode.evals.records import Sample, Task, read_verdicts
from hf_fastdecode.evals.sandbox import Limits, SandboxError, choose
from hf_fastdecode.evals.scoring import LANGUAGES, LanguageSupport, Result, judge
from hf_fastdecode.files import read_jsonl

from .example_tasks import Scripted

NONE = choose("none", allow_unsafe=True)
TASKS = [Task(name, "python", "", "", ("assert f()",), "f") for name in "ba"]
SAMPLES = [Sample(task.task_id, index, text) for task in TASKS for index, text in enumerate(("x", "y", "x"))]


@pytest.fixture(autouse=True)
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Scripted]:
    """The runner of Python and JavaScript, two programs between two writes."""
    Scripted.scripts, Scripted.seen, Scripted.walls = {}, [], []
    for language in ("python", "javascript"):
        monkeypatch.setitem(LANGUAGES, language, LanguageSupport(Scripted, Limits()))
    monkeypatch.setattr(scoring, "_PROGRAMS_AT_ONCE", 2)
    return Scripted


def run(path: Path, tasks: list[Task] = TASKS, samples: list[Sample] = SAMPLES, **options: Any) -> list[str]:
    verdicts = judge(tasks, samples, path, sandbox=NONE, workers=1, **options)
    assert [(one.task_id, one.index) for one in verdicts] == [(one.task_id, one.index) for one in samples]
    return [one.status for one in verdicts]


def lines(path: Path) -> list[tuple[str, int, str]]:
    return [(line["task_id"], line["index"], line["status"]) for line in map(json.loads, path.open())]


def test_a_line_for_each_sample_in_their_order(tmp_path: Path, recorder: type[Scripted]) -> None:
    path = tmp_path / "verdicts.jsonl"
    assert run(path) == ["pass"] * 6
    assert recorder.seen == [("b", "x"), ("b", "y"), ("a", "x"), ("a", "y")]
    assert lines(path) == [(one.task_id, one.index, "pass") for one in SAMPLES]
    before = path.stat()
    assert run(path) == ["pass"] * 6
    assert len(recorder.seen) == 4
    assert path.stat() == before, "nothing was to be written"


def test_a_broken_sandbox_leaves_one_line(tmp_path: Path, recorder: type[Scripted]) -> None:
    path = tmp_path / "verdicts.jsonl"
    recorder.scripts = {"y": [SandboxError("no sandbox")]}
    assert run(path) == ["pass", "sandbox_error", "pass"] * 2
    assert [status for _, _, status in lines(path)] == ["pass", "sandbox_error", "pass"] * 2
    recorder.scripts, recorder.seen[:] = {}, []
    assert run(path) == ["pass"] * 6
    assert recorder.seen == [("b", "y"), ("a", "y")]
    assert lines(path) == [(one.task_id, one.index, "pass") for one in SAMPLES]


def test_an_interrupted_scoring_goes_on(tmp_path: Path, recorder: type[Scripted]) -> None:
    path = tmp_path / "verdicts.jsonl"
    samples = [*SAMPLES, Sample("a", 3, "z")]
    recorder.scripts = {"z": [KeyboardInterrupt()]}
    with pytest.raises(KeyboardInterrupt):
        run(path, samples=samples)
    assert sorted(lines(path)) == sorted((one.task_id, one.index, "pass") for one in SAMPLES)
    recorder.scripts, recorder.seen[:] = {}, []
    path.write_bytes(path.read_bytes()[:-20])  # within a line
    (tmp_path / "verdicts.jsonl.partial").write_text('{"task_id": "left by a process that was killed"}\n')
    assert run(path, samples=samples) == ["pass"] * 7
    assert recorder.seen == [("a", "y"), ("a", "z")]
    assert lines(path) == [(one.task_id, one.index, "pass") for one in samples]
    assert sorted(one.name for one in tmp_path.iterdir()) == [".verdicts.jsonl.lock", "verdicts.jsonl"]


def test_one_process_at_a_time(tmp_path: Path, recorder: type[Scripted], monkeypatch: pytest.MonkeyPatch) -> None:
    """A second scoring into the file is refused while the first one checks a program, and harms nothing."""
    path = tmp_path / "verdicts.jsonl"
    found: list[object] = []

    def check(self: Scripted, task: Task, completion: str) -> Result:
        if not found:
            found.append("asked")
            try:
                found.append(judge(TASKS, SAMPLES[:1], path, sandbox=NONE, workers=1))
            except InputError as error:
                found.append(str(error))
        return Result("pass")

    monkeypatch.setattr(Scripted, "check", check)
    assert run(path) == ["pass"] * 6
    assert found[1:] == [f"another process scores into {path}; wait for it, or name another `out`"]
    assert lines(path) == [(one.task_id, one.index, "pass") for one in SAMPLES]


def test_a_part_of_the_samples_leaves_the_other_lines(tmp_path: Path, recorder: type[Scripted]) -> None:
    path = tmp_path / "verdicts.jsonl"
    run(path)
    content = path.read_bytes()
    run(path, samples=SAMPLES[:2])
    assert path.read_bytes() == content
    run(path, samples=SAMPLES[3:5])
    assert [line[:2] for line in lines(path)] == [("a", 0), ("a", 1), ("b", 0), ("b", 1), ("b", 2), ("a", 2)]
    run(path)
    assert path.read_bytes() == content
    assert len(recorder.seen) == 4


def test_the_stale_line_of_a_changed_sample_goes(tmp_path: Path, recorder: type[Scripted]) -> None:
    path = tmp_path / "verdicts.jsonl"
    run(path)
    stale = next(read_jsonl(path))["program"]
    changed = replace(SAMPLES[0], completion="z")
    run(path, samples=[changed])
    assert recorder.seen[4:] == [("b", "z")]
    assert [(one.task_id, one.index) for one in read_verdicts(path)] == [(one.task_id, one.index) for one in SAMPLES]
    assert stale != next(read_jsonl(path))["program"]
    with path.open("a") as file:  # as an interruption leaves it: the latest line of another sample counts
        file.write(json.dumps({"task_id": "a", "index": 2, "status": "fail", "program": "newer"}) + "\n")
    run(path, samples=[changed])
    assert lines(path)[-1] == ("a", 2, "fail")
    assert len(lines(path)) == len(SAMPLES)


DECIDE: dict[str, Callable[[Task], Task]] = {
    "tests": lambda task: replace(task, tests=("assert not f()",)),
    "number-of-tests": lambda task: replace(task, tests=("assert f()", "")),
    "setup": lambda task: replace(task, setup="x = 1"),
    "stem": lambda task: replace(task, stem="import math\n"),
    "entry-point": lambda task: replace(task, entry_point="g"),
    "language": lambda task: replace(task, language="javascript"),
}


@pytest.mark.parametrize("name", DECIDE)
def test_what_decides_a_verdict_makes_it_obsolete(tmp_path: Path, recorder: type[Scripted], name: str) -> None:
    """Also where a data file has changed since the samples were drawn: prompts alone are compared then."""
    path = tmp_path / "verdicts.jsonl"
    run(path)
    run(path, [DECIDE[name](TASKS[0]), TASKS[1]])
    assert recorder.seen[4:] == [("b", "x"), ("b", "y")]
    assert len(lines(path)) == len(SAMPLES)


def test_limits_decide_verdicts_and_descriptions_do_not(tmp_path: Path, recorder: type[Scripted]) -> None:
    path = tmp_path / "verdicts.jsonl"
    run(path)
    run(path, [replace(task, description="other", reference="other") for task in TASKS])
    run(path, limits=Limits())
    assert len(recorder.seen) == 4
    run(path, limits=Limits(cpu_seconds=5))
    assert len(recorder.seen) == 8


def test_verdicts_of_another_version_are_formed_again(
    tmp_path: Path, recorder: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "verdicts.jsonl"
    run(path)
    monkeypatch.setattr(scoring, "_PROTOCOL", scoring._PROTOCOL + 1)
    run(path)
    assert len(recorder.seen) == 8
    newer = LanguageSupport(Scripted, Limits(), version=lambda: "3.99")
    monkeypatch.setitem(LANGUAGES, "python", newer)
    run(path)
    assert len(recorder.seen) == 12
    run(path)
    assert len(recorder.seen) == 12


def test_batches_follow_the_cpus_that_may_be_used(
    tmp_path: Path, recorder: type[Scripted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two programs for each worker, as many workers as `score` has: an interruption loses no more."""
    path = tmp_path / "verdicts.jsonl"
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {3}, raising=False)
    recorder.scripts = {"z": [KeyboardInterrupt()]}
    samples = [Sample("a", 0, "x"), Sample("a", 1, "y"), Sample("a", 2, "z")]
    with pytest.raises(KeyboardInterrupt):
        judge(TASKS, samples, path, sandbox=NONE)
    assert len(lines(path)) == 2
