"""``eval run``: draw, time, score and report."""

from __future__ import annotations

from ...command_errors import CommandError
from ..console import note, quiet_libraries
from .check import check_references
from .generate import draw_samples
from .latency import time_samples
from .options import (
    DEFAULT_COUNTS,
    DEFAULT_SHOTS,
    Chat,
    Counts,
    Data,
    Dedup,
    Device,
    Dtype,
    Format,
    LatencyPrompts,
    Limit,
    Mode,
    Model,
    NewTokens,
    Out,
    Rows,
    SamplerName,
    SandboxName,
    Seed,
    Shots,
    Split,
    Stock,
    TaskIds,
    TaskName,
    Temperature,
    TopM,
    TopP,
    Unsafe,
    Workers,
    run_folder,
)
from .report import write_and_show
from .score import judge_samples, make_sandbox
from .setup import DrawOptions, Selection, prepare


def run(
    task: TaskName = "embedded",
    data: Data = None,
    split: Split = None,
    limit: Limit = None,
    task_ids: TaskIds = None,
    model: Model = "embedded",
    n: Counts = DEFAULT_COUNTS,
    prompt_format: Format = None,
    shots: Shots = DEFAULT_SHOTS,
    chat: Chat = False,
    temperature: Temperature = 0.8,
    top_p: TopP = 0.95,
    max_new_tokens: NewTokens = 128,
    seed: Seed = 0,
    rows: Rows = 128,
    mode: Mode = "auto",
    sampler: SamplerName = "auto",
    stock: Stock = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    latency: LatencyPrompts = 3,
    sandbox: SandboxName = "auto",
    allow_unsafe_code: Unsafe = False,
    workers: Workers = None,
    top_m: TopM = 3,
    deduplicate: Dedup = "text",
    out: Out = None,
) -> None:
    """Draw samples, time drawing, score in a sandbox, and report pass@n and pass@top-m against latency.

    Without arguments: the embedded model on the embedded tasks, offline. Everything goes into a folder, from which the
    same command goes on after an interruption. The steps are commands of their own: generate, latency, score, report.

    \b
        hf-fastdecode eval run
        hf-fastdecode eval run --limit 20 --n 1,8 --latency 1
        hf-fastdecode eval run --model MODEL --task mbpp --n 1,4,16,64 --out runs/mbpp
    """
    options = DrawOptions(
        model=model,
        dtype=dtype,
        device=device,
        format=prompt_format,
        shots=shots,
        chat=chat,
        counts=n,
        temperature=temperature,
        top_p=top_p,
        max_new_tokens=max_new_tokens,
        seed=seed,
        rows=rows,
        mode=mode,
        sampler=sampler,
        stock=stock,
    )
    options.check()
    from ...evals.generation.samples_file import merged_samples
    from ...evals.report import VERDICTS

    if latency < 0:
        raise CommandError(f"--latency must be at least 0, got {latency}; 0 times nothing")
    folder = run_folder(out, task, model)
    selection = Selection.of(task, data, split, limit, task_ids)
    tasks = selection.load().tasks
    place = make_sandbox(sandbox, allow_unsafe_code, tasks)
    failing = [verdict for verdict in check_references(tasks, place, workers) if not verdict.passed]
    if failing:
        note(
            f"{len(failing)} of {len(tasks)} reference solutions fail here, first that of task {failing[0].task_id} "
            f"({failing[0].status}: {failing[0].detail}); `hf-fastdecode eval check` lists them"
        )
    with quiet_libraries(warnings=True):
        prepared = prepare(options, selection, None)
        draw_samples(prepared, folder)
        if prepared.shard.count > 1:
            from accelerate import PartialState

            PartialState().wait_for_everyone()
        if not prepared.is_first:
            return
        if latency:
            time_samples(prepared, folder, latency)
    samples = merged_samples(folder, [one.task_id for one in tasks], prepared.settings.n)
    judge_samples(tasks, samples, folder / VERDICTS, place, workers)
    write_and_show(folder, top_m=top_m, deduplicate=deduplicate, counts=None)
