"""``eval check``: run the tasks' reference solutions on their tests."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from ...evals.records import Sample, Task, Verdict
from ...evals.sandbox import Sandbox
from .option_groups import expand_option_groups
from .options import SandboxOptions, TaskOptions


@expand_option_groups
def check(tasks: TaskOptions, sandbox: SandboxOptions) -> None:
    """Run the tasks' reference solutions on their tests: a check of data, sandbox and toolchain.

    Lists each failure with its cause. The exit code is 1 when a reference solution does not pass.
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
    from tqdm import tqdm

    from ...evals.scoring import score

    shown = not tqdm(disable=None).disable  # as bars are by themselves: on a terminal
    samples = [Sample(task.task_id, 0, task.reference) for task in tasks if task.reference is not None]
    by_id, limits = {task.task_id: task for task in tasks}, options.limits(tasks)
    return score(by_id, samples, sandbox=place, limits=limits, workers=options.workers, progress=shown)
