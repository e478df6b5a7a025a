"""``eval latency``: time drawing n samples of a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...command_errors import CommandError, forced_options
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
    SamplerName,
    Seed,
    Shots,
    Split,
    TaskIds,
    TaskName,
    Temperature,
    TopP,
    run_folder,
)
from .setup import DrawOptions, Prepared, Selection, prepare

if TYPE_CHECKING:
    from ...evals.generation.draw import Drawing


def latency(
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
    mode: Mode = "auto",
    sampler: SamplerName = "auto",
    dtype: Dtype = "auto",
    device: Device = "auto",
    prompts: Annotated[int, typer.Option(help="Prompts that are timed for each n: the first ones.", min=1)] = 3,
    out: Out = None,
) -> None:
    """Time drawing n samples of one prompt, with hf_fastdecode and without, into latency.csv of a run's folder.

    Rows end by their stop rules, as when samples are scored. Ways and numbers of samples that the file has already are
    not measured again; delete it to measure anew.
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
        rows=1,
        mode=mode,
        sampler=sampler,
        stock=False,
    )
    folder = run_folder(out, task, model)
    with quiet_libraries(warnings=True):
        prepared = prepare(options, Selection.of(task, data, split, limit, task_ids), None)
        time_samples(prepared, folder, prompts)


def time_samples(prepared: Prepared, folder: Path, prompts: int) -> None:
    """Time what the folder's latency.csv lacks."""
    from tqdm import tqdm

    from ...evals.generation.latency import measure_latency
    from ...evals.report import LATENCY, read_latency, write_latency
    from ...measurement.rows import provenance

    path = folder / LATENCY
    rows = list(read_latency(path)) if path.exists() else []
    if strange := [row.device for row in rows if row.device != prepared.device]:
        raise CommandError(f"{path} has rows of {strange[0]}, this is {prepared.device}; name another --out")
    asked = [(n, drawing) for n in prepared.counts for drawing in _ways(prepared)]
    left = [(n, drawing) for n, drawing in asked if not any((row.n, row.way) == (n, drawing.way) for row in rows)]
    settings = prepared.settings
    where = {name: value for name, value in provenance(prepared.model.device).items() if name != "device"}
    extra = where | {
        "model": settings.model,
        "dtype": settings.dtype,
        "task": settings.task,
        "prompt_tokens": _longest_prompt(prepared, prompts),
        "new_tokens": settings.max_new_tokens,
    }
    tasks = prepared.tasks.tasks[:prompts]
    with tqdm(total=len(left), desc="latency", unit="row", disable=None) as bar, forced_options():
        for n, drawing in left:
            bar.set_postfix_str(f"{drawing.way} n={n}")
            row = measure_latency(
                prepared.model,
                prepared.tokenizer,
                prepared.form,
                tasks,
                n,
                drawing,
                device=prepared.device,
                seed=prepared.settings.seed,
            )
            rows.append(row)
            write_latency(path, rows, extra)
            bar.update()
    note(f"{len(left)} rows measured into {path}")


def _longest_prompt(prepared: Prepared, prompts: int) -> int:
    """Tokens of the longest of the timed prompts."""
    form = prepared.form
    texts = [form.prompt(task) for task in prepared.tasks.tasks[:prompts]]
    encoded = prepared.tokenizer(texts, add_special_tokens=form.special_tokens, verbose=False).input_ids
    return max(map(len, encoded))


def _ways(prepared: Prepared) -> Iterator[Drawing]:
    from ...evals.generation.draw import Drawing

    settings = prepared.settings
    shared = Drawing(
        settings.temperature,
        settings.top_p,
        settings.max_new_tokens,
        "shared",
        settings.mode,
        settings.sampler,
    )
    yield shared
    yield replace(shared, way="stock", mode="auto", sampler="auto")
