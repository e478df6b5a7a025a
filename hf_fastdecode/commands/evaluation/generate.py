"""``eval generate``: draw samples."""

from __future__ import annotations

from pathlib import Path

from ...command_errors import forced_options
from ..console import note, quiet_libraries
from .options import (
    DEFAULT_COUNTS,
    DEFAULT_SHOTS,
    Chat,
    Counts,
    Data,
    Device,
    Dtype,
    Format,
    Limit,
    Mode,
    Model,
    NewTokens,
    Out,
    Rows,
    SamplerName,
    Seed,
    ShardText,
    Shots,
    Split,
    Stock,
    TaskIds,
    TaskName,
    Temperature,
    TopP,
    run_folder,
)
from .setup import DrawOptions, Prepared, Selection, prepare


def generate(
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
    shard: ShardText = None,
    out: Out = None,
) -> None:
    """Draw samples of every task into a run's folder, each with the model's raw log-probabilities.

    A row leaves the batch once its completion is over. Each `generate` call is on the disk before the next begins: run
    the same command again after an interruption, and it draws what is missing, the same as without one.

    \b
        hf-fastdecode eval generate --limit 20 --n 8
        hf-fastdecode eval generate --model MODEL --task mbpp --n 64 --out runs/mbpp
        accelerate launch -m hf_fastdecode eval generate --model MODEL --task humaneval
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
    folder = run_folder(out, task, model)
    with quiet_libraries(warnings=True):
        prepared = prepare(options, Selection.of(task, data, split, limit, task_ids), shard)
        draw_samples(prepared, folder)


def draw_samples(prepared: Prepared, folder: Path) -> None:
    """Draw what the folder lacks, with a bar, and say what was done."""
    from ...evals.generation.run import generate_samples

    if prepared.tasks.note and prepared.is_first:
        note(prepared.tasks.note)
    with forced_options():
        drawn = generate_samples(
            prepared.model,
            prepared.tokenizer,
            prepared.tasks.tasks,
            prepared.form,
            prepared.settings,
            folder,
            shard=prepared.shard,
            provenance=prepared.provenance,
        )
    note(f"{drawn:,} samples drawn into {folder / prepared.shard.file_name}")
