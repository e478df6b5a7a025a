"""Verdicts beside those of bigcode-evaluation-harness, on stored samples of MBPP and on mutants of its solutions.

``PYTHONHASHSEED=0 python -m tests.clients.verdicts --data MBPP --samples FILE --bigcode FOLDER [--load]``, where
FOLDER holds that project's ``execute.py`` (bigcode_eval/tasks/custom_metrics), which runs programs without a sandbox.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from tqdm import tqdm

from hf_fastdecode.evals.formats import import_samples
from hf_fastdecode.evals.records import Sample, Task, Verdict
from hf_fastdecode.evals.sandbox import Sandbox, choose
from hf_fastdecode.evals.scoring import LANGUAGES, score
from hf_fastdecode.evals.tasks import load_tasks

from .mutants import mutants

_SECONDS: Final = 3.0  # their limit; ours counts CPU time, so the clock may run further
_LIMITS: Final = replace(LANGUAGES["python"].limits, cpu_seconds=_SECONDS, wall_seconds=15.0)
_THEIRS: Final = ("passed", "failed", "timed out")

Check = Callable[[str, float, int, int], Mapping[str, Any]]


@dataclass(frozen=True)
class Judged:
    """A program with both verdicts.

    Attributes:
        task: Of the program.
        program: The whole of it.
        rule: How it came about.
        ours: As of `score`.
        theirs: ``passed``, ``timed out``, or ``failed: `` and a text.
    """

    task: Task
    program: str
    rule: str
    ours: Verdict
    theirs: str

    @property
    def differs(self) -> bool:
        """Whether one of them passes it and the other does not."""
        return self.ours.passed != (self.theirs == "passed")

    @property
    def cause(self) -> str:
        """Why the two differ; empty where that is not known."""
        return next((words for words, applies in _CAUSES.items() if applies(self)), "")


_CAUSES: Final[dict[str, Callable[[Judged], bool]]] = {
    "bigcode leaves out the task's setup code": lambda one: bool(one.task.setup) and "not defined" in one.theirs,
    "more than 16 MiB printed, which only we limit": lambda one: one.ours.status == "output",
    "`__name__` is `__main__` here, `builtins` there": lambda one: "__name__" in one.program,
    "the program's own `__eq__` is asked there only": lambda one: (
        "__eq__" in one.program and one.ours.status == "fail"
    ),
    "only the standard library can be imported here": lambda one: "ModuleNotFoundError" in one.ours.detail,
    "a function that bigcode takes away, as of os or shutil": lambda one: "'NoneType'" in one.theirs,
    "3 s of the clock there, 3 s of CPU time here": lambda one: one.theirs == "timed out",
}
"""In words, with how each is told; the first that applies counts."""


def bigcode_check(folder: Path) -> Check:
    """The function that bigcode-evaluation-harness checks a program with."""
    path = folder / "execute.py"
    spec = importlib.util.spec_from_file_location("bigcode_execute", path)
    if spec is None or spec.loader is None or not path.exists():
        raise typer.BadParameter(f"{path} is missing; name the folder bigcode_eval/tasks/custom_metrics")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    check: Check = module.check_correctness
    return check


def their_verdicts(check: Check, tasks: Mapping[str, Task], samples: Sequence[Sample]) -> list[str]:
    """Results as bigcode-evaluation-harness forms them: program and tests in one process, as one text."""

    def one(sample: Sample) -> str:
        text = "\n".join([sample.completion, *tasks[sample.task_id].tests])
        return str(check(text, _SECONDS, 0, 0)["result"])

    with ThreadPoolExecutor(_cpus()) as threads:
        return list(tqdm(threads.map(one, samples), total=len(samples), desc="bigcode", disable=None))


def our_verdicts(tasks: Mapping[str, Task], samples: Sequence[Sample], sandbox: Sandbox) -> list[Verdict]:
    """Verdicts of this package, as many programs at a time as the machine has CPUs."""
    shown = sys.stderr.isatty()
    return score(tasks, samples, sandbox=sandbox, limits=_LIMITS, workers=_cpus(), progress=shown)


@contextmanager
def busy_cpus() -> Iterator[int]:
    """Keep the machine busy by two processes a CPU that never wait; gives their number."""
    count = 2 * _cpus()
    with ExitStack() as stack:
        spinning = [
            stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"])) for _ in range(count)
        ]
        for process in spinning:
            stack.callback(process.kill)
        yield count


def agreement(pool: Sequence[Judged]) -> list[str]:
    """Our statuses against their results, as a table."""
    counts = Counter((one.ours.status, one.theirs.partition(":")[0]) for one in pool)
    statuses = dict.fromkeys(one.ours.status for one in sorted(pool, key=lambda one: one.ours.status != "pass"))
    lines = ["| ours | " + " | ".join(f"bigcode: {theirs}" for theirs in _THEIRS) + " |", "|---|---|---|---|"]
    for status in statuses:
        lines.append(f"| {status} | " + " | ".join(f"{counts[status, theirs]:,}" for theirs in _THEIRS) + " |")
    return lines


def differences(pool: Sequence[Judged]) -> list[str]:
    """Where one passes what the other does not: a line for each cause, as a table, and one for each program."""
    found = [one for one in pool if one.differs]
    counts = Counter((one.cause or "UNEXPLAINED", one.ours.status, one.theirs.partition(":")[0]) for one in found)
    lines = ["| programs | ours | bigcode | cause |", "|---|---|---|---|"]
    lines += [f"| {count:,} | {ours} | {theirs} | {cause} |" for (cause, ours, theirs), count in counts.most_common()]
    for one in found:
        said = f"{one.ours.status}{one.ours.detail and f' ({one.ours.detail[:80]})'} here, {one.theirs[:80]} there"
        lines.append(f"task {one.task.task_id}, {one.rule}: {said}: {one.cause or 'UNEXPLAINED'}")
    return lines if found else []


def main(
    data: Annotated[Path, typer.Option(help="MBPP, as published.")],
    samples: Annotated[Path, typer.Option(help="Stored samples.")],
    bigcode: Annotated[Path, typer.Option(help="Folder with bigcode-evaluation-harness's execute.py.")],
    load: Annotated[bool, typer.Option("--load", help="Score ours again, with all CPUs busy.")] = False,
) -> None:
    """Score the same programs with both, and print where they agree and why they differ."""
    multiprocessing.set_start_method("fork")  # their processes are not to import this file
    check, sandbox = bigcode_check(bigcode), choose()
    tested = load_tasks("mbpp", data=data).tasks
    tasks = {task.task_id: task for task in tested}
    made = mutants(tested)
    pools = {
        "stored samples": [("a stored sample", sample) for sample in import_samples(samples, tested)],
        "references and mutants": [(mutant.rule, mutant.sample) for mutant in made],
    }
    wrong = False
    for name, programs in pools.items():
        given = [sample for _, sample in programs]
        theirs = their_verdicts(check, tasks, given)
        ours = our_verdicts(tasks, given, sandbox)
        pool = [
            Judged(tasks[sample.task_id], sample.completion, rule, verdict, said)
            for (rule, sample), verdict, said in zip(programs, ours, theirs, strict=True)
        ]
        same = sum(not one.differs for one in pool)
        print(f"\n{name}: {same:,} of {len(pool):,} verdicts are the same", *agreement(pool), sep="\n")
        print(*differences(pool), sep="\n")
        wrong |= any(one.differs and not one.cause for one in pool)
        if load:
            with busy_cpus() as count:
                again = our_verdicts(tasks, given, sandbox)
            moved = [(one, other) for one, other in zip(ours, again, strict=True) if one.status != other.status]
            print(f"{len(moved):,} of our {len(ours):,} verdicts change beside {count} spinning processes")
            print(*(f"{one} becomes {other}" for one, other in moved), sep="\n")
            wrong |= bool(moved)
    raise typer.Exit(wrong)


def _cpus() -> int:
    return len(os.sched_getaffinity(0))


if __name__ == "__main__":
    typer.run(main)
