"""Drawing all samples of a run: unit by unit, each on the disk before the next begins."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hf_fastdecode.devices import out_of_memory

from ...command_errors import CommandError
from ..prompts import PromptFormat
from ..task import Task
from .draw import Drawing, draw_rows, read_samples, sharing
from .samples_file import done_units, open_samples
from .settings import RunSettings, claim_folder
from .units import WHOLE, Shard, units_of


def generate_samples(
    model: Any,
    tokenizer: Any,
    tasks: Sequence[Task],
    form: PromptFormat,
    settings: RunSettings,
    folder: Path,
    *,
    shard: Shard = WHOLE,
    provenance: dict[str, Any] | None = None,
    progress: bool = True,
) -> int:
    """Draw the samples of a run that its folder does not hold yet.

    An interrupted run loses the unit under way; started again, it draws the same samples as one that was not
    interrupted, on the same device and versions.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer, padding on the left.
        tasks: Of the run.
        form: Of the prompts.
        settings: Of the run.
        folder: Where its files go.
        shard: Which part of the units to draw.
        provenance: Kept in the folder's settings, for people.
        progress: Show a bar.

    Returns:
        Samples drawn now.

    Raises:
        CommandError: The folder is that of another run, or the rows of a call do not fit into memory.
    """
    claim_folder(folder, settings, provenance or {})
    ids = [task.task_id for task in tasks]
    units = units_of(len(tasks), settings.n, settings.rows)
    drawing = Drawing(
        settings.temperature,
        settings.top_p,
        settings.max_new_tokens,
        settings.way,
        settings.mode,
        settings.sampler,
    )
    done = done_units(folder, units, ids)
    own = shard.own(units)
    left = [unit for unit in own if unit not in done]
    drawn_now = 0
    bar = tqdm(
        total=sum(unit.count * len(unit.tasks) for unit in own),
        initial=sum(unit.count * len(unit.tasks) for unit in own if unit in done),
        desc="samples",
        unit="sample",
        disable=None if progress else True,
    )
    with bar, sharing(model, drawing), open_samples(folder / shard.file_name, units, ids) as file:
        for unit in left:
            chosen = [tasks[task] for task in unit.tasks]
            try:
                rows = draw_rows(
                    model, tokenizer, form, chosen, unit.count, drawing, seed=unit.seed(settings.seed, ids)
                )
            except RuntimeError as error:
                if not out_of_memory(error):
                    raise
                raise CommandError(
                    f"{unit.count * len(chosen)} rows of up to {settings.max_new_tokens} new tokens do not fit into "
                    f"the memory of {model.device}; pass a smaller --rows (now {settings.rows}), and another --out"
                ) from error
            samples = read_samples(rows, model, tokenizer, form, chosen, first=unit.first)
            file.write(samples)
            drawn_now += len(samples)
            bar.update(len(samples))
    return drawn_now
