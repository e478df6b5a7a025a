"""Drawing all samples of a run, unit by unit; each is on the disk before the next begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ...errors import InputError
from ...measurement.calls import memory_and_logit_errors
from ..prompts import PromptFormat
from ..records import Task
from ..settings import RunSettings, claim_folder
from .draw import draw_rows, samples_of, sharing
from .samples_file import Unit, open_samples, units_of


def generate_samples(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    form: PromptFormat,
    settings: RunSettings,
    folder: Path,
    *,
    shared: bool = False,
    provenance: dict[str, Any] | None = None,
) -> int:
    """Draw the samples of a run that its folder does not hold yet, and return how many were drawn.

    Of a `shared` run, those that no other process draws; it ends when all are drawn. An interrupted run loses the unit
    under way. Started again, it draws the same samples as an uninterrupted run on the same device and versions. An
    InputError where the folder belongs to another run, another process draws into it and the run is not shared, or the
    rows of a call do not fit into memory.
    """
    claim_folder(folder, settings, provenance or {})
    ids = [task.task_id for task in tasks]
    units, drawn = units_of(len(tasks), settings.n, settings.rows), 0
    no_memory = InputError(
        f"calls of up to {settings.rows} rows and {settings.drawing.max_new_tokens} new tokens do not fit into the "
        f"memory of {model.device}; pass a smaller `rows`, and another `out`"
    )
    opened = open_samples(folder, units, ids, shared=shared)
    with opened as (file, left, there), sharing(model, settings.drawing):
        bar = tqdm(
            total=_samples(units),
            initial=there,
            desc="samples",
            unit="sample",
            disable=None,
        )
        for unit in left:
            chosen, seed = [tasks[task] for task in unit.tasks], unit.seed(settings.seed, ids)
            with memory_and_logit_errors(model, lambda: no_memory):
                rows = draw_rows(model, tokenizer, form, chosen, unit.count, settings.drawing, seed=seed)
            file.write(samples_of(rows, model, tokenizer, form, chosen, first=unit.first))
            drawn += _samples([unit])
            bar.update(_samples([unit]))
        bar.close()
    return drawn


def _samples(units: Sequence[Unit]) -> int:
    return sum(unit.count * len(unit.tasks) for unit in units)
