"""Which samples one call of `generate` draws, from which seed, and the file that a run appends them to.

A unit is the samples of one call. A shard of a run has every N-th unit and a file of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...files import JsonlWriter, exclusive, json_lines, read_jsonl, write_text
from ..records import Sample, read_samples
from ..settings import SAMPLES, sample_files


@dataclass(frozen=True)
class Unit:
    """The samples of one call: numbers of its tasks in the run, the index of each task's first sample, samples per
    task.
    """

    tasks: tuple[int, ...]
    first: int
    count: int

    def seed(self, run_seed: int, task_ids: Sequence[str]) -> int:
        """The call's seed, from that of the run, the ids of its tasks and its first sample."""
        text = "\n".join([str(run_seed), str(self.first), *(task_ids[task] for task in self.tasks)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def places(self, task_ids: Sequence[str]) -> list[tuple[str, int]]:
        """Task and index of each sample, in the order of the call's rows."""
        return [(task_ids[task], self.first + offset) for task in self.tasks for offset in range(self.count)]


def units_of(tasks: int, n: int, rows: int) -> list[Unit]:
    """Divide `n` samples of each of `tasks` tasks into calls of at most `rows` rows.

    Several tasks share a call where their samples fit; otherwise a task's samples come in chunks.
    """
    if n >= rows:
        chunks = [(first, min(rows, n - first)) for first in range(0, n, rows)]
        return [Unit((task,), first, count) for task in range(tasks) for first, count in chunks]
    together = rows // n
    return [Unit(tuple(range(first, min(first + together, tasks))), 0, n) for first in range(0, tasks, together)]


@dataclass(frozen=True)
class Shard:
    """One of several processes that share a run; numbers start at 1."""

    number: int = 1
    count: int = 1

    @classmethod
    def parse(cls, text: str) -> Shard:
        """Read ``i/N`` with `i` from 1 to `N`."""
        number, slash, count = text.partition("/")
        if not (
            slash and text.isascii() and number.isdecimal() and count.isdecimal() and 1 <= int(number) <= int(count)
        ):
            raise InputError(f"`shard` must be i/N with i from 1 to N, such as 1/4, got {text!r}")
        return cls(int(number), int(count))

    def own(self, units: Sequence[Unit]) -> list[Unit]:
        """The units that this process draws."""
        return list(units[self.number - 1 :: self.count])

    @property
    def file_name(self) -> str:
        """Where its samples go; those of several shards are merged into that of one."""
        return SAMPLES if self.count == 1 else f"samples-{self.number}-of-{self.count}.jsonl"


WHOLE = Shard()
"""One process for all of a run."""


@contextmanager
def open_samples(
    folder: Path, shard: Shard, units: Sequence[Unit], task_ids: Sequence[str]
) -> Iterator[tuple[JsonlWriter, list[Unit]]]:
    """A process's file to append samples to, and the units of which the run's files lack samples.

    Samples of a unit that an interruption left incomplete are removed first, and so are repeated ones. An InputError
    where another process writes to the file.
    """
    path = folder / shard.file_name
    with exclusive(path, _held(path)):
        if path.exists():
            _remove_incomplete(path, units, task_ids)
        done = {_place(line) for file in sample_files(folder) for line in read_jsonl(file)}
        with JsonlWriter(path) as file:
            yield file, [unit for unit in units if not done.issuperset(unit.places(task_ids))]


def _held(path: Path) -> InputError:
    return InputError(f"another process draws samples into {path}; wait for it, or name another `out`")


def _remove_incomplete(path: Path, units: Sequence[Unit], task_ids: Sequence[str]) -> None:
    """Leave one line for each sample, of those units whose samples are all there."""
    lines = list(read_jsonl(path))
    found: dict[tuple[Any, Any], dict[str, Any]] = {}
    for line in lines:
        found.setdefault(_place(line), line)
    whole: set[tuple[Any, Any]] = set()
    for places in (unit.places(task_ids) for unit in units):
        if found.keys() >= set(places):
            whole.update(places)
    kept = [line for place, line in found.items() if place in whole]
    if len(kept) < len(lines):
        write_text(path, json_lines(kept))


def _place(line: dict[str, Any]) -> tuple[Any, Any]:
    return line.get("task_id"), line.get("index")


def merged_samples(folder: Path, task_ids: Sequence[str], n: int) -> list[Sample]:
    """The samples of a run, `n` for each task, ordered by task and index; files of shards are merged into one.

    An InputError where there are none, shards have not drawn all of theirs, or two files hold different samples of
    the same number.
    """
    files = sample_files(folder)
    samples: dict[tuple[str, int], Sample] = {}
    for path in files:
        for sample in read_samples(path):
            if samples.setdefault((sample.task_id, sample.index), sample) != sample:
                raise InputError(
                    f"{folder} holds two samples {sample.index} of task {sample.task_id}; remove one of the files "
                    f"{', '.join(path.name for path in files)}"
                )
    if not samples:
        raise InputError(f"{folder} has no samples; draw some with hf-fastdecode eval generate `out={folder}`")
    order = {task_id: at for at, task_id in enumerate(task_ids)}
    merged = sorted(samples.values(), key=lambda sample: (order.get(sample.task_id, len(order)), sample.index))
    if any(path.name != SAMPLES for path in files):
        if len(merged) < n * len(task_ids):
            raise InputError(
                f"the shards in {folder} hold {len(merged):,} of {n * len(task_ids):,} samples; draw the rest first"
            )
        whole = folder / SAMPLES
        with exclusive(whole, _held(whole)):
            write_text(whole, json_lines(merged))
            for path in files:
                if path != whole:
                    path.unlink(missing_ok=True)
    return merged
