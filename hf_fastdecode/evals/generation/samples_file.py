"""The file that a run appends its samples to, and takes up again after an interruption."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
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


def merged_samples(folder: Path, task_ids: Sequence[str], n: int) -> list[Sample]:
    """The samples of a run, ordered by task and index; files of shards are merged into one.

    Args:
        folder: Of the run.
        task_ids: Of the run's tasks, in order.
        n: Samples of each task.

    Raises:
        CommandError: There are none, shards have not drawn all of theirs, or two files hold another sample of the
            same number.
    """
    files = sample_files(folder)
    samples: dict[tuple[str, int], Sample] = {}
    for path in files:
        for sample in read_samples(path):
            if samples.setdefault((sample.task_id, sample.index), sample) != sample:
                raise CommandError(
                    f"{folder} holds two samples {sample.index} of task {sample.task_id}; remove one of the files "
                    f"{', '.join(path.name for path in files)}"
                )
    if not samples:
        raise CommandError(f"{folder} has no samples; draw some with `hf-fastdecode eval generate --out {folder}`")
    order = {task_id: at for at, task_id in enumerate(task_ids)}
    merged = sorted(samples.values(), key=lambda sample: (order.get(sample.task_id, len(order)), sample.index))
    if any(path.name != SAMPLES for path in files):
        if len(merged) < n * len(task_ids):
            raise CommandError(
                f"the shards in {folder} hold {len(merged):,} of {n * len(task_ids):,} samples; draw the rest first"
            )
        write_text(folder / SAMPLES, lambda file: file.writelines(_lines([asdict(sample) for sample in merged])))
        for path in files:
            if path.name != SAMPLES:
                path.unlink()
    return merged
