"""The file that a run appends its samples to, and takes up again after an interruption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...errors import CommandError
from ...files import JsonlWriter, exclusive, json_lines, read_jsonl, write_text
from ..records import Sample, read_samples
from ..settings import SAMPLES, sample_files
from .units import Shard, Unit


@contextmanager
def open_samples(
    folder: Path, shard: Shard, units: Sequence[Unit], task_ids: Sequence[str]
) -> Iterator[tuple[JsonlWriter, list[Unit]]]:
    """Open a process's file to append samples to.

    Samples of a unit that an interruption left incomplete are removed first, and so are repeated ones.

    Args:
        folder: Of the run.
        shard: Whose file.
        units: Of the run.
        task_ids: Of the run's tasks.

    Yields:
        The file, and the units of which a file of the run lacks samples.

    Raises:
        CommandError: Another process writes to the file.
    """
    path = folder / shard.file_name
    with exclusive(path, _held(path)):
        if path.exists():
            _remove_incomplete(path, units, task_ids)
        done = {_place(line) for file in sample_files(folder) for line in read_jsonl(file)}
        with JsonlWriter(path) as file:
            yield file, [unit for unit in units if not done.issuperset(_places(unit, task_ids))]


def _held(path: Path) -> CommandError:
    return CommandError(f"another process draws samples into {path}; wait for it, or name another `out`")


def _remove_incomplete(path: Path, units: Sequence[Unit], task_ids: Sequence[str]) -> None:
    """Leave one line for each sample, of those units whose samples are all there."""
    lines = list(read_jsonl(path))
    found: dict[tuple[Any, Any], dict[str, Any]] = {}
    for line in lines:
        found.setdefault(_place(line), line)
    whole: set[tuple[Any, Any]] = set()
    for places in (_places(unit, task_ids) for unit in units):
        if found.keys() >= set(places):
            whole.update(places)
    kept = [line for place, line in found.items() if place in whole]
    if len(kept) < len(lines):
        write_text(path, json_lines(kept))


def _place(line: dict[str, Any]) -> tuple[Any, Any]:
    return line.get("task_id"), line.get("index")


def _places(unit: Unit, task_ids: Sequence[str]) -> list[tuple[Any, Any]]:
    return [(task_ids[task], index) for task, index in unit.samples()]


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
        raise CommandError(f"{folder} has no samples; draw some with hf-fastdecode eval generate `out={folder}`")
    order = {task_id: at for at, task_id in enumerate(task_ids)}
    merged = sorted(samples.values(), key=lambda sample: (order.get(sample.task_id, len(order)), sample.index))
    if any(path.name != SAMPLES for path in files):
        if len(merged) < n * len(task_ids):
            raise CommandError(
                f"the shards in {folder} hold {len(merged):,} of {n * len(task_ids):,} samples; draw the rest first"
            )
        whole = folder / SAMPLES
        with exclusive(whole, _held(whole)):
            write_text(whole, json_lines(merged))
            for path in files:
                if path != whole:
                    path.unlink(missing_ok=True)
    return merged
