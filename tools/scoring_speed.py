"""The table of docs/sandbox.md: ``python -m tools.scoring_speed`` scores programs in new and in forked sandboxes.

Programs are the solutions of the embedded tasks, every fourth of them changed, on an idle machine and beside twice as
many busy processes as it has cores. All ways must give the same verdicts. Let nothing else run meanwhile.
"""

from __future__ import annotations

import multiprocessing
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.sandbox import Sandbox, choose
from hf_fastdecode.evals.scoring import score
from hf_fastdecode.evals.tasks import load_tasks
from hf_fastdecode.measurement.rows import markdown

from .pages import DOCS, replace_table

_SECONDS = 10.0
"""Time limit of a program without a sandbox."""


def programs() -> tuple[dict[str, Task], list[Sample]]:
    """The embedded tasks by id, and a solution of each; every fourth returns something else."""
    tasks = {task.task_id: task for task in load_tasks("embedded").tasks}
    samples = []
    for number, task in enumerate(tasks.values()):
        solution = task.reference or ""
        samples.append(Sample(task.task_id, 0, solution.replace("return ", "return 1 ==", number % 4 == 0)))
    return tasks, samples


def passes_unconfined(task: Task, sample: Sample) -> bool:
    """Whether a program passes its tests, run with them in a process of its own that isolates nothing."""
    with multiprocessing.Manager() as manager:
        passed = manager.list()
        process = multiprocessing.Process(target=_execute, args=(task, sample, passed))
        process.start()
        process.join(_SECONDS)
        process.kill()
        process.join()
        return bool(passed)


def _execute(task: Task, sample: Sample, passed: list[bool]) -> None:
    names: dict[str, object] = {}
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - the process ends with it
    exec("\n".join((task.program(sample.completion), task.setup, *task.tests)), names)
    passed.append(True)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Context in which so many processes compute."""
    spinning = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(processes)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


def per_second(run: Callable[[], Sequence[bool]], expected: Sequence[bool]) -> float:
    """Programs that `run` judges in a second; its verdicts must be those expected."""
    start = time.perf_counter()
    found = run()
    seconds = time.perf_counter() - start
    if list(found) != list(expected):
        wrong = [number for number, (one, two) in enumerate(zip(found, expected, strict=True)) if one != two]
        sys.exit(f"verdicts differ, of programs {wrong}")
    return len(found) / seconds


def main() -> None:
    """Measure, and rewrite the table."""
    tasks, samples = programs()
    sandbox, cores = choose("auto"), len(os.sched_getaffinity(0))
    if not sandbox.forks:
        sys.exit(f"forks of {sandbox.name} do not isolate here")

    def unconfined() -> list[bool]:
        return [passes_unconfined(tasks[sample.task_id], sample) for sample in samples]

    def scored(box: Sandbox, workers: int) -> float:
        def run() -> list[bool]:
            verdicts = score(tasks, samples, sandbox=box, workers=workers, progress=False)
            return [verdict.status == "pass" for verdict in verdicts]

        return per_second(run, expected)

    expected, lines = unconfined(), []
    for load in (0, 2 * cores):
        with busy(load):
            alone = per_second(unconfined, expected)
            for workers in (1, 2):
                new, forked = scored(replace(sandbox, may_fork=False), workers), scored(sandbox, workers)
                without = f"{alone:.1f}" if workers == 1 else ""
                lines.append([str(load), str(workers), f"{new:.1f}", f"{forked:.1f}", without])
                print(lines[-1], flush=True)
    names = ["busy processes", "workers", f"new sandboxes of `{sandbox.name}`", "forked", "no sandbox, one at a time"]
    where = f"{cores} cores, {platform.machine()}, Python {platform.python_version()}, Linux {platform.release()}"
    table = markdown(names, lines, f"{len(samples)} programs, scored in a second; {where}.")
    replace_table(DOCS / "sandbox.md", "tools.scoring_speed", table)


if __name__ == "__main__":
    main()
