"""``eval score`` and ``eval check``: run samples, or reference solutions, on their tasks' tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ...evals.records import Sample, Task, Verdict
from ...evals.run_folder import VERDICTS
from ...evals.sandbox import Sandbox
from ..checks import parse_counts
from ..console import note, resumed_by_same_command
from ..options import expand_option_groups
from .options import Samples, SandboxOptions, Shard, TaskOptions
from .stored import stored_samples


@expand_option_groups
def score(
    samples: Samples,
    tasks: TaskOptions,
    sandbox: SandboxOptions,
    n: Annotated[
        str | None,
        typer.Option(
            help="Only the first so many samples of each task: of several numbers, the largest.", show_default="all"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="File of results: one JSON object per sample and line, with passed and status.",
            show_default="verdicts.jsonl of the folder, SAMPLES.results.jsonl for a file",
            dir_okay=False,
        ),
    ] = None,
    shard: Shard = False,
) -> None:
    """Run samples on their tasks' tests in a sandbox, and write a verdict for each.

    A verdict is formed outside of the program's process, from plain data that the program returns. Equal programs run
    once. A program has 10 s of CPU time (`--cpu-seconds`); what meets the limit on the clock (`--wall-seconds`)
    because other programs kept the CPU busy runs again alone. Run the same command again after an interruption, and it
    goes on; with other limits, programs run again.

    A run's folder knows its tasks. For a file, `--split` is by default all of them, and `--limit` and `--task-ids`
    score a part of it.

    Status: pass, fail, compile (the program does not), timeout, memory, output (too much of it); unjudged, where the
    tests need one process for themselves and the program, and sandbox_error, which say nothing about the program.
    Unjudged samples count as failed, and "at most" says what pass@1 is if they are right.

    Examples:

        hf-fastdecode eval score runs/mbpp
        hf-fastdecode eval score samples.jsonl --task mbpp --data mbpp.jsonl \\
            --out results.jsonl
        hf-fastdecode eval score generations.json --task mbpp --split test
    """
    most = None if n is None else parse_counts("n", n)[-1]
    found, drawn = stored_samples(samples, tasks)
    drawn = [sample for sample in drawn if most is None or sample.index < most]
    path = out or (samples / VERDICTS if samples.is_dir() else samples.with_name(samples.name + ".results.jsonl"))
    judge_samples(found.tasks, drawn, path, sandbox.make(found.tasks), sandbox, shared=shard)


def judge_samples(
    tasks: Sequence[Task],
    samples: Sequence[Sample],
    path: Path,
    place: Sandbox,
    options: SandboxOptions,
    *,
    shared: bool = False,
) -> list[Verdict]:
    """Score, and say how many passed."""
    from ...evals.metrics import pass_at_k
    from ...evals.scoring import judge

    limits = options.limits(tasks)
    with resumed_by_same_command(path):
        verdicts = judge(tasks, samples, path, sandbox=place, limits=limits, workers=options.workers, shared=shared)
    counts = Counter(verdict.status for verdict in verdicts)
    sizes = Counter(verdict.task_id for verdict in verdicts)

    def mean(*statuses: str) -> float:
        right = Counter(verdict.task_id for verdict in verdicts if verdict.status in statuses)
        return 100 * sum(pass_at_k(sizes[one], right[one], 1) for one in sizes) / max(1, len(sizes))

    bound = f", at most {mean('pass', 'unjudged'):.1f} %" if counts["unjudged"] else ""
    print(
        f"{counts['pass']:,} of {len(verdicts):,} samples of {len(sizes):,} tasks pass; "
        f"pass@1 {mean('pass'):.1f} %{bound}"
    )
    if others := ", ".join(f"{count:,} {status}" for status, count in counts.most_common() if status != "pass"):
        print(f"the others: {others}")
    note(f"verdicts in {path}")
    return verdicts


@expand_option_groups
def check(tasks: TaskOptions, sandbox: SandboxOptions) -> None:
    """Run the tasks' reference solutions on their tests: a check of data, sandbox and toolchain.

    Lists each failure with its cause. The exit code is 1 when a reference solution does not pass.

    Examples:

        hf-fastdecode eval check --task mbpp --data mbpp.jsonl
    """
    chosen = tasks.load().tasks
    verdicts = check_references(chosen, sandbox.make(chosen), sandbox)
    for verdict in verdicts:
        if not verdict.passed:
            print(f"{verdict.task_id}: {verdict.status}{verdict.detail and ', '}{verdict.detail}")
    passed, without = sum(verdict.passed for verdict in verdicts), len(chosen) - len(verdicts)
    share = f" ({100 * passed / len(verdicts):.1f} %)" if verdicts else ""
    print(
        f"{passed:,} of {len(verdicts):,} reference solutions pass{share}"
        + (f"; {without:,} tasks have none" if without else "")
    )
    if passed < len(verdicts):
        raise typer.Exit(1)


def check_references(tasks: Sequence[Task], place: Sandbox, options: SandboxOptions) -> list[Verdict]:
    """Verdicts on the reference solutions of the tasks that have one."""
    from ...evals.scoring import score

    samples = [Sample(task.task_id, 0, task.reference) for task in tasks if task.reference is not None]
    by_id, limits = {task.task_id: task for task in tasks}, options.limits(tasks)
    return score(by_id, samples, sandbox=place, limits=limits, workers=options.workers)
