"""Scoring samples: equal programs once, several at a time; again and alone where a busy machine may be the cause."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Final

from tqdm import tqdm

from ..records import Language, Sample, Task, Verdict
from ..sandbox import Limits, Sandbox, SandboxError
from .java import JAVA
from .javascript import JAVASCRIPT
from .python import PYTHON
from .runner import BrokenServerError, LanguageSupport, Result, Runner

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

    Samples of a task with the same text run once. Limits on CPU time decide; a program that meets the wall-clock limit
    runs again after all others, alone, in new processes and with more time, and so does one whose sandbox broke. Where
    the tests' process breaks down each time, but not with a program that is known to be right, the program has failed.
    Otherwise the status ``sandbox_error`` remains: it says nothing about the program.

    Raises:
        ValueError: A sample's task is not among the tasks, or has tests that cannot be run.
        SandboxError: Programs of a language cannot be checked on this machine.
    """
    programs = dict.fromkeys((sample.task_id, sample.completion) for sample in samples)
    if unknown := sorted({task_id for task_id, _ in programs} - tasks.keys()):
        raise ValueError(
            f"{len(unknown)} samples' tasks are unknown, such as {unknown[0]!r}; give the tasks they were drawn for"
        )
    for language in sorted({tasks[task_id].language for task_id, _ in programs}):
        if missing := LANGUAGES[language].missing():
            raise SandboxError(missing)
    for task_id in sorted({task_id for task_id, _ in programs}):
        LANGUAGES[tasks[task_id].language].check_task(tasks[task_id])
    board = _Board(tasks, sandbox, limits)
    with tqdm(total=len(programs), desc="score", unit="program", disable=None if progress else True) as bar:
        results = board.check(list(programs), workers or usable_cpus(), bar.update)
    doubtful = [key for key, result in results.items() if result.load or result.status == "sandbox_error"]
    results |= board.check_alone(doubtful)
    results |= board.check_alone([key for key, result in results.items() if result.status == "sandbox_error"])
    results |= _settle_sandbox_errors(board, tasks, results)
    keys = ((sample, (sample.task_id, sample.completion)) for sample in samples)
    return [
        Verdict(one.task_id, one.index, results[key].status, results[key].detail, results[key].outputs)
        for one, key in keys
    ]


def _settle_sandbox_errors(
    board: _Board, tasks: Mapping[str, Task], results: Mapping[_Key, Result]
) -> dict[_Key, Result]:
    """The results of programs that are the cause of a ``sandbox_error``.

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
    """Hands programs out to worker threads, each with runners of its own."""

    def __init__(self, tasks: Mapping[str, Task], sandbox: Sandbox, limits: Limits | None):
        self._tasks, self._sandbox, self._limits = tasks, sandbox, limits

    def check_alone(self, keys: Sequence[_Key]) -> dict[_Key, Result]:
        """The results of programs, one at a time, with patience and each with processes that no other has used."""
        return {key: result for one in keys for key, result in self.check([one], 1, patience=_PATIENCE).items()}

    def check(
        self, keys: Sequence[_Key], workers: int, on_done: Callable[[], object] = lambda: None, patience: int = 1
    ) -> dict[_Key, Result]:
        """The results of programs; an exception in one worker ends all after their current program."""
        waiting, lock, stopped = iter(keys), threading.Lock(), threading.Event()
        results: dict[_Key, Result] = {}
        errors: list[BaseException] = []

        def work() -> None:
            with ExitStack() as stack:
                runners: dict[Language, Runner] = {}
                while not stopped.is_set():
                    with lock:
                        key = next(waiting, None)
                    if key is None:
                        return
                    task = self._tasks[key[0]]
                    if task.language not in runners:
                        runners[task.language] = stack.enter_context(self._runner(task.language, patience))
                    try:
                        results[key] = runners[task.language].check(task, key[1])
                    except BrokenServerError as error:
                        own = error.result
                        results[key] = Result("sandbox_error", str(error), own.load, status_if_at_fault=own.status)
                    except SandboxError as error:
                        results[key] = Result("sandbox_error", str(error))
                    with lock:
                        on_done()

        def guarded_work() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
                stopped.set()

        # Daemons: after Ctrl-C nobody waits for them, and their sandboxes die with them.
        threads = [threading.Thread(target=guarded_work, daemon=True) for _ in range(min(workers, len(keys)))]
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

    def _runner(self, language: Language, patience: int) -> Runner:
        support = LANGUAGES[language]
        limits = self._limits or support.limits
        return support.runner(self._sandbox, replace(limits, wall_seconds=patience * limits.wall_seconds))


def usable_cpus() -> int:
    """The number of CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
