"""Scoring of samples on the tests of their tasks: equal programs once, several at a time, in doubt again alone."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, replace
from itertools import groupby, islice
from pathlib import Path
from typing import Any, Final

from tqdm import tqdm

from ...errors import InputError
from ...files import exclusive, json_lines, read_jsonl, write_text
from ..records import Language, Sample, Task, Verdict
from ..run_folder import Lines, part_files, sample_key, work
from ..sandbox import Limits, Sandbox, SandboxError
from .java_and_javascript import JAVA, JAVASCRIPT
from .python import PYTHON
from .runner import BrokenServerError, LanguageSupport, Result, Runner

__all__ = ["LANGUAGES", "LanguageSupport", "Result", "Runner", "check_tasks", "judge", "score", "usable_cpus"]

LANGUAGES: Final[dict[Language, LanguageSupport]] = {"python": PYTHON, "java": JAVA, "javascript": JAVASCRIPT}

_PATIENCE: Final = 4  # times the limit on wall-clock time, when running alone

_Key = tuple[str, str]  # task id, completion


def score(
    tasks: Mapping[str, Task],
    samples: Sequence[Sample],
    *,
    sandbox: Sandbox,
    limits: Limits | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> list[Verdict]:
    """Run samples on the tests of their tasks, which are given by id; returns a verdict per sample, in their order.

    Samples of a task with the same text run once. Limits on CPU time decide; a program that reaches the wall-clock
    limit runs again after all others, alone, in new processes and with more time, and so does one whose sandbox broke.
    Where the tests' process breaks down each time, but not with a program that is known to be right, the program has
    failed. Otherwise the status ``sandbox_error`` remains. A ValueError for a sample without a task, or with tests
    that cannot be run; a SandboxError where programs of a language cannot be checked on this machine.
    """
    programs = dict.fromkeys((sample.task_id, sample.completion) for sample in samples)
    if unknown := sorted({task_id for task_id, _ in programs} - tasks.keys()):
        raise ValueError(
            f"{len(unknown)} samples' tasks are unknown, such as {unknown[0]!r}; give the tasks they were drawn for"
        )
    check_tasks(tasks[task_id] for task_id in sorted({task_id for task_id, _ in programs}))
    board = _Board(tasks, sandbox, limits)
    with tqdm(total=len(programs), desc="score", unit="program", disable=None if progress else True) as bar:
        results = board.check(list(programs), workers or usable_cpus(), bar.update)
    doubtful = [key for key, result in results.items() if result.load or result.status == "sandbox_error"]
    results |= board.check_alone(doubtful)
    results |= board.check_alone([key for key, result in results.items() if result.status == "sandbox_error"])
    results |= _settle_sandbox_errors(board, tasks, results)
    found = (results[sample.task_id, sample.completion] for sample in samples)
    return [
        Verdict(sample.task_id, sample.index, result.status, result.detail, result.outputs)
        for sample, result in zip(samples, found)
    ]


def check_tasks(tasks: Iterable[Task]) -> None:
    """Raise a SandboxError for tasks of a language that is missing here, a ValueError for tests that cannot run."""
    for task in tasks:
        if missing := LANGUAGES[task.language].missing():
            raise SandboxError(missing)
        LANGUAGES[task.language].check_task(task)


def _settle_sandbox_errors(
    board: _Board, tasks: Mapping[str, Task], results: Mapping[_Key, Result]
) -> dict[_Key, Result]:
    """Return the results of programs that are the cause of a ``sandbox_error``.

    Else a program could leave its task's pool by returning what the tests' process breaks down at. That the process
    does not break down by itself is shown by a program of the same task that passes: another sample, or the reference
    solution. A task without one is believed where a busy machine cannot be the cause either.
    """
    suspects = {key: result for key, result in results.items() if result.status_if_at_fault is not None}
    passing = {task_id for (task_id, _), result in results.items() if result.status == "pass"}
    references = {task_id: tasks[task_id].reference for task_id, _ in suspects if task_id not in passing}
    asked = [(task_id, text) for task_id, text in references.items() if text is not None]
    found = {**board.check_alone([key for key in asked if key not in results]), **results}
    passing |= {key[0] for key in asked if found[key].status == "pass"}
    broken = {key[0] for key in asked if found[key].status == "sandbox_error"}
    return {
        key: Result(result.status_if_at_fault, result.detail)
        for key, result in suspects.items()
        if result.status_if_at_fault is not None and (key[0] in passing or (key[0] not in broken and not result.load))
    }


class _Board:
    def __init__(self, tasks: Mapping[str, Task], sandbox: Sandbox, limits: Limits | None):
        self._tasks, self._sandbox, self._limits = tasks, sandbox, limits

    def check_alone(self, keys: Sequence[_Key]) -> dict[_Key, Result]:
        """Check programs one at a time, with longer limits and each in new processes."""
        return {key: result for one in keys for key, result in self.check([one], 1, patience=_PATIENCE).items()}

    def check(
        self, keys: Sequence[_Key], workers: int, on_done: Callable[[], object] = lambda: None, patience: int = 1
    ) -> dict[_Key, Result]:
        """Check programs; an exception in one worker ends all after their current program."""
        waiting, lock, stopped = iter(keys), threading.Lock(), threading.Event()
        results: dict[_Key, Result] = {}
        errors: list[BaseException] = []

        def check_all() -> None:
            try:
                with ExitStack() as stack:
                    runners: dict[Language, Runner] = {}
                    while not stopped.is_set():
                        with lock:
                            key = next(waiting, None)
                        if key is None:
                            return
                        task = self._tasks[key[0]]
                        if task.language not in runners:
                            support = LANGUAGES[task.language]
                            limits = self._limits or support.limits
                            limits = replace(limits, wall_seconds=patience * limits.wall_seconds)
                            runners[task.language] = stack.enter_context(support.runner(self._sandbox, limits))
                        results[key] = _checked(runners[task.language], task, key[1])
                        with lock:
                            on_done()
            except BaseException as error:
                errors.append(error)
                stopped.set()

        # Daemons: after Ctrl-C nobody waits for them, and their sandboxes die with them.
        threads = [threading.Thread(target=check_all, daemon=True) for _ in range(min(workers, len(keys)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            stopped.set()
        if errors:
            raise errors[0]
        return results


def _checked(runner: Runner, task: Task, completion: str) -> Result:
    try:
        return runner.check(task, completion)
    except BrokenServerError as error:
        broken = error.result
        return Result("sandbox_error", str(error), broken.load, status_if_at_fault=broken.status)
    except SandboxError as error:
        return Result("sandbox_error", str(error))


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


_PROGRAMS_AT_ONCE: Final = 128
"""Programs per worker between two writes."""

_PROTOCOL: Final = 5
"""Raised with each change of what verdicts mean or hold, so that those of older files are formed again."""


def judge(
    tasks: Sequence[Task],
    samples: Sequence[Sample],
    path: Path,
    *,
    sandbox: Sandbox,
    limits: Limits | None = None,
    workers: int | None = None,
    shared: bool = False,
) -> list[Verdict]:
    """Score samples and write a line for each: a `Verdict`'s fields, ``passed``, and a hash of what decided it.

    Existing lines are kept where program, tests, limits, the language's version and the meaning of verdicts are the
    same; a ``sandbox_error`` is scored again. Lines are appended as they come. At the end the file has one line for
    each of these samples, in their order as the returned verdicts, and then one for each other sample that it had. An
    InputError where the file holds something other than results, or another process scores into it.
    """
    workers = workers or usable_cpus()
    by_id = {task.task_id: task for task in tasks}
    programs = {sample: _digest(by_id[sample.task_id], sample, limits) for sample in samples}
    # Equal programs stand together, so that they run once.
    order = {program: at for at, program in enumerate(dict.fromkeys(programs.values()))}
    lines = Lines(lambda: [*filter(Path.exists, [path]), *part_files(path)])
    known: dict[tuple[Any, ...], Verdict] = {}

    def left(part: Sequence[Sample]) -> list[Sample]:
        if not all(_identity(sample, programs[sample]) in known for sample in part):
            known.update(_known(path, lines.new()))
        return [sample for sample in part if _identity(sample, programs[sample]) not in known]

    def scored(part: list[Sample]) -> Iterator[dict[str, Any]]:
        verdicts = score(by_id, part, sandbox=sandbox, limits=limits, workers=workers, progress=False)
        for sample, verdict in zip(part, verdicts, strict=True):
            known[_identity(sample, programs[sample])] = verdict
            yield _line(verdict, programs[sample])

    in_order = sorted(samples, key=lambda sample: order[programs[sample]])
    parts = list(_parts(in_order, programs, _PROGRAMS_AT_ONCE * (1 if shared else workers)))
    held = InputError(f"another process scores into {path}; wait for it, or name another `out`")
    with work(path, len(parts), lambda number: not left(parts[number]), shared=shared, held=held) as (file, pending):
        there = len(samples) - len(left(in_order))
        with tqdm(total=len(samples), initial=there, desc="score", unit="sample", disable=None) as bar:
            for number in pending:
                todo = left(parts[number])
                file.write(scored(todo))
                bar.update(len(todo))
        known.update(_known(path, lines.new()))  # what others have scored
        found = [known[_identity(sample, programs[sample])] for sample in samples]
        results = [_line(verdict, programs[sample]) for verdict, sample in zip(found, samples, strict=True)]
        with exclusive(path, None) if shared else nullcontext():
            _compact(path, results)
            for part_file in part_files(path) if shared else ():
                part_file.unlink(missing_ok=True)
        return found


def _line(verdict: Verdict, program: str) -> dict[str, Any]:
    return {**asdict(verdict), "passed": verdict.passed, "program": program}


def _compact(path: Path, lines: Sequence[dict[str, Any]]) -> None:
    found = list(read_jsonl(path)) if path.exists() else []
    others = {sample_key(line): line for line in found if {"task_id", "index"} <= line.keys()}
    for line in lines:
        others.pop(sample_key(line), None)
    wanted = [*lines, *others.values()]
    if found != wanted:
        write_text(path, json_lines(wanted))


def _parts(in_order: Sequence[Sample], programs: dict[Sample, str], count: int) -> Iterator[list[Sample]]:
    """Divide samples, of which those of equal programs are neighbours, into parts of `count` different programs."""
    groups = (list(group) for _, group in groupby(in_order, key=programs.__getitem__))
    while together := list(islice(groups, count)):
        yield [sample for group in together for sample in group]


def _known(path: Path, lines: Iterator[dict[str, Any]]) -> Iterator[tuple[tuple[Any, ...], Verdict]]:
    for line in lines:
        if "status" not in line:
            raise InputError(f"{path} holds lines that are no results; name another `out`")
        if line["status"] != "sandbox_error" and {"task_id", "index", "program"} <= line.keys():
            fields = (line["task_id"], line["index"], line["status"], line.get("detail", ""), line.get("outputs", ""))
            yield _identity(verdict := Verdict(*fields), line["program"]), verdict


def _identity(one: Sample | Verdict, program: str) -> tuple[Any, ...]:
    return one.task_id, one.index, program


def _digest(task: Task, sample: Sample, limits: Limits | None) -> str:
    language = LANGUAGES[task.language]
    content = asdict(task) | {
        "completion": sample.completion,
        "limits": asdict(limits or language.limits),
        "protocol": _PROTOCOL,
        "version": language.version(),
    }
    del content["description"], content["reference"]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
