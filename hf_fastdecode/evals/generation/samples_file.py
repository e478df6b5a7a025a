"""The file that a run appends its samples to, and takes up again after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from ...command_errors import CommandError
from ..jsonl import JsonlWriter, read_jsonl, read_samples
from ..records import Sample
from ..report.files import write_text
from .units import Unit

SAMPLES = "samples.jsonl"


def sample_files(folder: Path) -> list[Path]:
    """The files of samples in a run's folder: of one process, or of its shards."""
    return sorted([*folder.glob(SAMPLES), *folder.glob("samples-*-of-*.jsonl")])


def done_units(folder: Path, units: Sequence[Unit], task_ids: Sequence[str]) -> set[Unit]:
    """The units of which a run's files hold every sample."""
    present = {(line["task_id"], line["index"]) for path in sample_files(folder) for line in read_jsonl(path)}
    return {unit for unit in units if all((task_ids[task], index) in present for task, index in unit.samples())}


def open_samples(path: Path, units: Sequence[Unit], task_ids: Sequence[str]) -> JsonlWriter:
    """Open a file to append samples to; those of a unit that an interruption left incomplete are removed first.

    Args:
        path: Of the file.
        units: Of the run.
        task_ids: Of the run's tasks.
    """
    if path.exists():
        lines = list(read_jsonl(path))
        unit_of = {(task_ids[task], index): unit for unit in units for task, index in unit.samples()}
        counts: dict[Unit | None, int] = {}
        owners = [unit_of.get((line["task_id"], line["index"])) for line in lines]
        for unit in owners:
            counts[unit] = counts.get(unit, 0) + 1
        whole = {unit for unit, count in counts.items() if unit is not None and count == len(list(unit.samples()))}
        kept = [line for line, unit in zip(lines, owners, strict=True) if unit in whole]
        if len(kept) < len(lines):
            write_text(path, lambda file: file.writelines(_lines(kept)))
    return JsonlWriter(path)


def _lines(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    return (json.dumps(record, ensure_ascii=False) + "\n" for record in records)


def merged_samples(folder: Path, task_ids: Sequence[str] | None = None) -> list[Sample]:
    """The samples of a run, those of all its shards, ordered by task and index.

    Args:
        folder: Of the run.
        task_ids: The order of the tasks; that of first appearance when None.

    Raises:
        CommandError: There are none, or one occurs twice.
    """
    samples = [sample for path in sample_files(folder) for sample in read_samples(path)]
    if not samples:
        raise CommandError(f"{folder} has no samples; draw some with `hf-fastdecode eval generate --out {folder}`")
    order = {task_id: at for at, task_id in enumerate(task_ids or dict.fromkeys(one.task_id for one in samples))}
    samples.sort(key=lambda sample: (order.get(sample.task_id, len(order)), sample.index))
    for one, other in pairwise(samples):
        if (one.task_id, one.index) == (other.task_id, other.index):
            raise CommandError(
                f"{folder} holds sample {one.index} of task {one.task_id} twice; remove one of the files "
                f"{', '.join(path.name for path in sample_files(folder))}"
            )
    return samples
