"""Which samples one call of `generate` draws, from which seed, and the file that a run appends them to.

A unit is the samples of one call. Processes that share a run have a file each, and take units from a queue.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import InputError
from ...files import JsonlWriter, exclusive, json_lines, read_jsonl, write_text
from ..queue import Lines, Queue, mend_unheld, own_part
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


@contextmanager
def open_samples(
    folder: Path, units: Sequence[Unit], task_ids: Sequence[str], *, shared: bool = False
) -> Iterator[tuple[JsonlWriter, Iterator[Unit], int]]:
    """A file to append samples to, the units that this process is to draw, and how many samples there are already.

    Of a `shared` run, a file and the units of one process: those that no other draws, see `Queue`; a unit is drawn
    when the next is asked for. Samples of a unit that an interruption left incomplete are removed first, and so are
    repeated ones. An InputError where another process writes to the file of a run that is not shared.
    """
    places = [frozenset(unit.places(task_ids)) for unit in units]
    done: set[tuple[Any, Any]] = set()
    lines = Lines(lambda: sample_files(folder))

    def is_done(number: int) -> bool:
        if not done >= places[number]:
            done.update(map(_place, lines.new()))
        return done >= places[number]

    whole = folder / SAMPLES
    with ExitStack() as stack:
        mend_unheld(sample_files(folder), lambda path: _remove_incomplete(path, units, task_ids))
        if shared:
            file = stack.enter_context(own_part(whole))
            numbers = stack.enter_context(Queue(folder / f".{SAMPLES}.claims", len(units))).numbers(is_done)
        else:
            stack.enter_context(exclusive(whole, _held(whole)))
            file = stack.enter_context(JsonlWriter(whole))
            numbers = (number for number in range(len(units)) if not is_done(number))
        done.update(map(_place, lines.new()))
        yield file, (units[number] for number in numbers), sum(len(own & done) for own in places)


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
    """The samples of a run, `n` for each task, ordered by task and index; files of several processes become one.

    An InputError where there are none, processes that share the run have not drawn all, or two files hold different
    samples of the same number.
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
                f"the files in {folder} hold {len(merged):,} of {n * len(task_ids):,} samples; draw the rest first"
            )
        whole = folder / SAMPLES
        with exclusive(whole, _held(whole)):
            write_text(whole, json_lines(merged))
            for path in files:
                if path != whole:
                    path.unlink(missing_ok=True)
    return merged
