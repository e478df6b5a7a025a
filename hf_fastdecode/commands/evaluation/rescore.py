"""``eval rescore``: log-probabilities of stored samples by teacher forcing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..console import note, quiet_libraries
from .options import DEFAULT_SHOTS, Chat, Data, Device, Dtype, Format, Model, Shots, TaskName
from .setup import Selection


def rescore(
    samples: Annotated[Path, typer.Argument(help="A file of samples, from here or another tool.", exists=True)],
    out: Annotated[Path, typer.Option(help="File of samples to write, with log-probabilities.", dir_okay=False)],
    task: TaskName = "embedded",
    data: Data = None,
    model: Model = "embedded",
    prompt_format: Format = None,
    shots: Shots = DEFAULT_SHOTS,
    chat: Chat = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
) -> None:
    """Give stored samples a model's log-probabilities, by one pass over each (teacher forcing).

    The model may be another one than drew them.
    """
    from tqdm import tqdm

    from ...devices import pick_device
    from ...evals.formats import read_samples, write_samples
    from ...evals.generation.rescore import rescored
    from ...evals.prompts import prompt_format as make_format
    from ..models import load_model

    tasks = Selection.of(task, data, split="all").load()
    given = read_samples(samples, tasks.tasks)
    with quiet_libraries(warnings=True):
        loaded, tokenizer = load_model(model, dtype, pick_device(device))
        form = make_format(tasks, prompt_format, shots=shots, chat_tokenizer=tokenizer if chat else None)
        found = []
        for one in tqdm(tasks.tasks, desc="rescore", unit="task", disable=None):
            own = [sample for sample in given if sample.task_id == one.task_id]
            found += rescored(loaded, tokenizer, form, one, own) if own else []
    write_samples(out, found, tasks.tasks)
    note(f"{len(found):,} samples with log-probabilities in {out}")
