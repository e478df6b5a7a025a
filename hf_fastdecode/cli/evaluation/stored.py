"""Stored samples with their tasks, of a run's folder or a file: ``eval score``, ``check``, ``export``, ``rescore``.

And ``eval run`` and ``eval report``: draw, time and score samples, and report accuracy against latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal, cast

import typer

from ...errors import InputError
from ...evals.formats import FORMS, Form, export_samples, import_samples
from ...evals.records import Sample, Task, Verdict
from ...evals.run_folder import VERDICTS, read_settings
from ...evals.sandbox import Sandbox
from ...evals.tasks import TaskSet
from ..console import note, prints_tables, quiet_libraries, resumed_by_same_command, show_tables
from ..options import check_choice, expand_option_groups, parse_counts, pick_device
from .generate import Options, draw_samples, launched, load_suitable_tasks, prepare, time_samples
from .options import (
    PROMPTS,
    TASKS,
    TASKS_DIGEST,
    ModelOptions,
    Out,
    PromptOptions,
    ReportOptions,
    Samples,
    SandboxOptions,
    Shard,
    TaskOptions,
    run_folder,
)


@expand_option_groups
def score(
    samples: Samples,
    tasks: TaskOptions,
    sandbox: SandboxOptions,
    n: str | None = typer.Option(
        None, help="Only the first so many samples of each task: of several numbers, the largest.", show_default="all"
    ),
    out: Path | None = typer.Option(
        None,
        help="File of results: one JSON object per sample and line, with passed and status.",
        show_default="verdicts.jsonl of the folder, SAMPLES.results.jsonl for a file",
        dir_okay=False,
    ),
    shard: Shard = False,
) -> None:
    """Run samples on their tasks' tests in a sandbox, and write a verdict for each.

    A verdict is formed outside of the program's process, from plain data that the program returns. Equal programs run
    once. A program has 10 s of CPU time (`--cpu-seconds`); what reaches the limit on the clock (`--wall-seconds`)
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
    backend: Sandbox,
    options: SandboxOptions,
    *,
    shared: bool = False,
) -> list[Verdict]:
    from ...evals.metrics import pass_at_k
    from ...evals.scoring import judge

    limits = options.limits(tasks)
    with resumed_by_same_command(path):
        verdicts = judge(tasks, samples, path, sandbox=backend, limits=limits, workers=options.workers, shared=shared)
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


def check_references(tasks: Sequence[Task], backend: Sandbox, options: SandboxOptions) -> list[Verdict]:
    from ...evals.scoring import score

    samples = [Sample(task.task_id, 0, task.reference) for task in tasks if task.reference is not None]
    by_id, limits = {task.task_id: task for task in tasks}, options.limits(tasks)
    return score(by_id, samples, sandbox=backend, limits=limits, workers=options.workers)


@expand_option_groups
def export(
    samples: Samples,
    out: Annotated[Path, typer.Option(help="File to write.", dir_okay=False)],
    tasks: TaskOptions,
    form: str = typer.Option("human-eval", help=f"{', '.join(FORMS)}."),
) -> None:
    """Write samples in the form of another tool: human-eval, mxeval, EvalPlus or bigcode-evaluation-harness.

    `human-eval` and `mxeval` hold completions, `evalplus` and `bigcode` whole programs, `own` log-probabilities too.

    Examples:

        hf-fastdecode eval export runs/mbpp --form evalplus --out samples.jsonl
    """
    check_choice("form", [form], FORMS)
    chosen, found = stored_samples(samples, tasks)
    export_samples(out, found, chosen.tasks, cast(Form, form))
    note(f"{len(found):,} samples in {out}")


@expand_option_groups
def rescore(
    samples: Samples,
    out: Annotated[Path, typer.Option(help="File of samples to write, with log-probabilities.", dir_okay=False)],
    tasks: TaskOptions,
    model: ModelOptions,
    prompts: PromptOptions,
) -> None:
    """Give stored samples a model's log-probabilities, by one pass over each (teacher forcing).

    The model may be another one than drew them. A run's folder knows its prompts. Run the same command again after an
    interruption, and it goes on.

    Examples:

        hf-fastdecode eval rescore runs/mbpp --model MODEL --out rescored.jsonl
    """
    from ...evals.generation import rescore_samples
    from ..models import load_model

    chosen, given = stored_samples(samples, tasks)
    prompts = prompt_options(samples, prompts)
    with quiet_libraries(warnings=True):
        loaded, tokenizer = load_model(model.model, model.dtype, pick_device(model.device))
        with resumed_by_same_command(out):
            rescore_samples(loaded, tokenizer, prompts.make(chosen, tokenizer), chosen.tasks, given, out)
    note(f"{len(given):,} samples with log-probabilities in {out}")


def stored_samples(path: Path, options: TaskOptions) -> tuple[TaskSet, list[Sample]]:
    """Tasks and samples of a run's folder, which knows its tasks, or of a file, of which the options say them."""
    return _of_run(path, options) if path.is_dir() else _of_file(path, options)


def prompt_options(path: Path, given: PromptOptions) -> PromptOptions:
    """The prompt options of stored samples: a run's folder knows them, for a file they are given."""
    if not path.is_dir():
        return given
    if given != PromptOptions():
        raise InputError(f"{path} knows its prompts; leave out --format, --shots and --chat")
    try:
        return PromptOptions(**read_settings(path)["provenance"][PROMPTS])
    except (KeyError, TypeError) as error:
        raise InputError(f"{path} does not say which prompts its samples follow; name the file in it") from error


def _of_file(path: Path, options: TaskOptions) -> tuple[TaskSet, list[Sample]]:
    chosen = replace(options, split=options.split or "all").load()
    every = replace(options, split="all", limit=None, task_ids=None).load(silent=True)  # chosen's note is theirs
    return chosen, import_samples(path, every.tasks, chosen.tasks)


def _of_run(folder: Path, options: TaskOptions) -> tuple[TaskSet, list[Sample]]:
    from ...evals.run_folder import merged_samples

    settings = read_settings(folder)
    if options != TaskOptions():
        raise InputError(f"{folder} knows its tasks; leave out --task, --data, --split, --limit and --task-ids")
    try:
        selected, digest = TaskOptions.from_json(settings["provenance"][TASKS]), settings["provenance"][TASKS_DIGEST]
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder} does not say which tasks its samples are of; name the file in it") from error
    tasks = selected.load()
    if tasks.digest != digest:
        raise InputError(
            f"the tasks in {tasks.origin} are no longer those that {folder} has samples of; put the old ones back, or "
            "draw samples anew into another folder"
        )
    samples = merged_samples(folder, [task.task_id for task in tasks.tasks], settings["n"])
    if len(samples) < (planned := settings["n"] * len(tasks.tasks)):
        note(f"{folder} holds {len(samples):,} of {planned:,} samples; the others are not drawn yet")
    return tasks, samples


@expand_option_groups
def run(
    options: Options,
    sandbox: SandboxOptions,
    reporting: ReportOptions,
    latency: int = typer.Option(3, help="Prompts that are timed for each n, the first ones; 0 times nothing.", min=0),
    out: Out = None,
) -> None:
    """Draw samples, time drawing, score in a sandbox, and report pass@n and pass@top-m against latency.

    Without arguments: the embedded model on the embedded tasks, offline. Everything goes into a folder, from which the
    same command goes on after an interruption. After `torchrun ... -m hf_fastdecode` a `--` comes before the command,
    else torchrun takes `--n` for itself. The steps are also separate commands: generate, latency, score, report.

    Examples:

        hf-fastdecode eval run
        hf-fastdecode eval run --limit 20 --n 1,8 --latency 1
        hf-fastdecode eval run --model MODEL --task mbpp --n 1,4,16,64 \\
            --out runs/mbpp
        torchrun --nproc-per-node 2 -m hf_fastdecode -- eval run --model MODEL \\
            --n 1,64
    """
    chosen = load_suitable_tasks(options)
    backend = sandbox.make(chosen.tasks)
    rank, processes = launched(options.model.device)
    folder = run_folder(out, options.tasks.task, options.model.model)
    if rank == 0:
        note(_scoring(chosen, options.draw.counts[-1], backend, folder))
        verdicts = check_references(chosen.tasks, backend, sandbox)
        if failing := [verdict for verdict in verdicts if not verdict.passed]:
            note(
                f"{len(failing)} of {len(verdicts)} reference solutions fail here, first that of task "
                f"{failing[0].task_id} ({failing[0].status}: {failing[0].detail}); `hf-fastdecode eval check` lists "
                "them"
            )
    with quiet_libraries(warnings=True):
        prepared = prepare(options, chosen)
        draw_samples(prepared, folder, shared=processes > 1)
        if processes > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
        if rank > 0:
            return
        if latency:
            time_samples(prepared, folder, latency, [options.decoding.mode])
    from ...evals.run_folder import merged_samples

    samples = merged_samples(folder, [task.task_id for task in chosen.tasks], prepared.counts[-1])
    judge_samples(chosen.tasks, samples, folder / VERDICTS, backend, sandbox)
    write_and_show(folder, folder, reporting)


def _scoring(chosen: TaskSet, n: int, backend: Sandbox, folder: Path) -> str:
    count, languages = len(chosen.tasks), sorted({task.language for task in chosen.tasks})
    return (
        f"scores {n * count:,} samples, {n:,} of each of {count:,} tasks ({chosen.name}, {', '.join(languages)}), "
        f"in the sandbox {backend.name}; samples go to {folder}"
    )


@prints_tables
@expand_option_groups
def report(
    folder: Annotated[Path, typer.Argument(help="A run's folder.", exists=True, file_okay=False)],
    reporting: ReportOptions,
    n: str | None = typer.Option(
        None, help="Numbers of samples to show, commas between.", show_default="powers of two, and those timed"
    ),
    rank: bool = typer.Option(True, "--rank/--no-rank", help="Rank samples by their log-probabilities."),
    seed: int = typer.Option(0, help="Seed of the bootstrap and of Monte Carlo estimates.", min=0),
    out: Path | None = typer.Option(None, help="Folder to write to.", show_default="that of the run", file_okay=False),
) -> None:
    """Show pass@n and pass@top-m against latency, and write metrics.json, curve.csv, pictures and report.html.

    All n follow exactly from one pool of samples per task. Accuracy and latency come from separate runs, and are
    joined by n. Intervals are bootstrap intervals over tasks.

    Examples:

        hf-fastdecode eval report runs/mbpp --n 1,8,64 --format markdown
    """
    ns = None if n is None else parse_counts("n", n)
    write_and_show(folder, out or folder, reporting, ns=ns, rank=rank, seed=seed)


def write_and_show(
    folder: Path, out: Path, options: ReportOptions, *, ns: list[int] | None = None, rank: bool = True, seed: int = 0
) -> None:
    from ...evals.report import report as build
    from ...evals.report_files import report_text, write_report

    deduplicate = cast(Literal["text", "ast"], options.deduplicate)
    found = build(folder, m=options.top_m if rank else None, ks=ns, seed=seed, deduplicate=deduplicate)
    files = write_report(found, out)
    show_tables(report_text(found))
    note("written: " + ", ".join(str(path) for path in files))
