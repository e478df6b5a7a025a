"""The folder of a run: its settings, files of samples, and the work that processes share by it."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from ..errors import InputError
from ..files import JsonlWriter, exclusive, json_lines, read_jsonl, write_json, write_text
from .records import Sample, Way, read_samples

_PAUSE: Final = 0.5
"""Seconds between two checks of other processes' progress."""


class Queue:
    """Numbered items of work, each done by one of the processes that share a file.

    A claim is a lock on a byte of the file, which ends with its process, however that ends: what a killed process had
    claimed and not finished is claimed again, and so is an item whose result does not count for others. On a file
    system without locks every process does everything.
    """

    def __init__(self, path: Path, count: int):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+b")
        self._count = count

    def numbers(self, is_done: Callable[[int], bool]) -> Iterator[int]:
        """Claim items until all are done, by this process or another; one is done when the next is asked for.

        `is_done` says whether the files hold an item now. While others do the last ones, it waits for them.
        """
        waiting = list(range(self._count))
        while waiting:
            busy = []
            for number in waiting:
                if is_done(number):
                    continue
                if not self._claim(number):
                    busy.append(number)
                else:
                    if not is_done(number):  # not finished between the two
                        yield number
                    self._release(number)
            if len(busy) == len(waiting):
                time.sleep(_PAUSE)
            waiting = busy

    def _claim(self, number: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):  # another has it; systems differ in how they say so
            return False
        except OSError:  # a file system without locks, each raises another error
            return True
        return True

    def _release(self, number: int) -> None:
        with suppress(OSError):
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    def close(self) -> None:
        self._file.close()


class _HeldError(Exception):
    """Another process writes to a file."""


def part_files(whole: Path) -> list[Path]:
    return sorted(whole.parent.glob(f"{whole.stem}.part-*{whole.suffix}"))


@contextmanager
def work(
    whole: Path, count: int, is_done: Callable[[int], bool], *, shared: bool, held: InputError
) -> Iterator[tuple[JsonlWriter, Iterator[int]]]:
    """A file to append results to, and the numbers of items that this process is to do.

    Of `shared` work a part of the whole file, and a `Queue`; otherwise the file, or the error `held` where another
    process writes to it. `is_done` says whether the files hold an item now.
    """
    with ExitStack() as stack:
        if shared:
            file = stack.enter_context(_own_part(whole))
            queue = stack.enter_context(closing(Queue(whole.with_name(f".{whole.name}.claims"), count)))
            yield file, queue.numbers(is_done)
        else:
            stack.enter_context(exclusive(whole, held))
            file = stack.enter_context(JsonlWriter(whole))
            yield file, (number for number in range(count) if not is_done(number))


@contextmanager
def _own_part(whole: Path) -> Iterator[JsonlWriter]:
    for number in itertools.count(1):
        path = whole.with_name(f"{whole.stem}.part-{number}{whole.suffix}")
        try:
            with exclusive(path, _HeldError()), JsonlWriter(path) as file:
                yield file
                return
        except _HeldError:
            continue


class Lines:
    """Reads JSON files that other processes append to or replace. All lines come, some may come again."""

    def __init__(self, files: Callable[[], list[Path]]):
        self._files = files
        self._read: dict[Path, tuple[int, int]] = {}  # the file's inode, and how many bytes

    def new(self) -> Iterator[dict[str, Any]]:
        """Read whole lines since the call before, and all of a file that was replaced."""
        for path in self._files():
            try:
                with path.open("rb") as file:
                    inode = os.fstat(file.fileno()).st_ino
                    known, start = self._read.get(path, (inode, 0))
                    start = file.seek(start if known == inode else 0)
                    content = file.read()
            except FileNotFoundError:  # merged by another process
                continue
            end = content.rfind(b"\n") + 1
            self._read[path] = inode, start + end
            if start:  # of our writers
                yield from map(json.loads, content[:end].splitlines())
            else:
                yield from read_jsonl(path)


SETTINGS: Final = "settings.json"
SAMPLES: Final = "samples.jsonl"
VERDICTS: Final = "verdicts.jsonl"
LATENCY: Final = "latency.csv"

_FINGERPRINT: Final = "fingerprint"
_VERSIONS: Final = ("torch", "transformers", "hf_fastdecode")


def sample_files(folder: Path) -> list[Path]:
    """List the files of samples in a run's folder: of one process, or of those that share the run."""
    return sorted([*folder.glob(SAMPLES), *part_files(folder / SAMPLES)])


@dataclass(frozen=True)
class Drawing:
    """Settings of drawing samples.

    With `processed`, log-probabilities after temperature and top-p are gathered too. Samples are then drawn by
    transformers' sampler, from other random numbers than those of the sampling kernel.
    """

    temperature: float = 0.8  # divides the logits; 0 is greedy
    top_p: float = 0.95  # of the smallest set of tokens of this probability; 1 is off
    max_new_tokens: int = 128  # of a sample
    way: Way = "shared"
    mode: str = "auto"  # as for `hf_fastdecode.enable`
    sampler: str = "auto"  # as for `hf_fastdecode.enable`
    processed: bool = False

    def options(self) -> dict[str, Any]:
        """Arguments of `generate`. top_k is off: unset, it would be 50."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {"do_sample": True, "temperature": self.temperature, "top_p": self.top_p, "top_k": 0}


@dataclass(frozen=True)
class RunSettings:
    """The settings that decide which samples a run draws, except versions."""

    model: str  # name or folder of the checkpoint
    weights: str  # digest of weights, config and tokenizer: `generation.weights`
    dtype: str  # of the parameters
    device: str  # its type
    task: str  # name of the tasks
    prompts: str  # `prompts_digest`
    format: str  # name of the prompt format
    n: int  # samples of each task
    seed: int  # from which that of every call is derived
    rows: int  # most of a call: which rows share one decides rounding and random numbers
    drawing: Drawing = Drawing()

    def flat(self) -> dict[str, Any]:
        fields = asdict(self)
        return fields | fields.pop("drawing")


def prompts_digest(task_ids: Sequence[str], prompts: Sequence[Sequence[int]]) -> str:
    """Hash the tasks' ids and the tokens of their prompts, in order."""
    return _digest([list(task_ids), [list(prompt) for prompt in prompts]])


def claim_folder(folder: Path, settings: RunSettings, provenance: dict[str, Any]) -> None:
    """Write the run's settings into its folder, which is made if need be, or check that it has the same ones.

    The provenance has versions, which must not change within a run, and what else is kept for people. An InputError
    where the folder holds a run with other settings or versions, settings that cannot be read, or samples or verdicts
    without settings.
    """
    path = folder / SETTINGS
    deciding = settings.flat() | {name: provenance[name] for name in _VERSIONS if name in provenance}
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(path, None):  # processes of one launch come here at once
        if not path.exists():
            if kept := [*sample_files(folder), *folder.glob(VERDICTS)]:
                raise InputError(f"{folder} holds {kept[0].name} of no known run; name another `out`")
            content = {**settings.flat(), _FINGERPRINT: _digest(deciding), "provenance": provenance}
            write_json(path, content, indent=2)
            return
    found = read_settings(folder)
    if found[_FINGERPRINT] == _digest(deciding):
        return
    before = found["provenance"] | found
    for name, value in deciding.items():
        if before.get(name) != value:
            raise InputError(
                f"{folder} holds a run with another {_WORDS.get(name, name)} ({before.get(name)!r}, now {value!r}); "
                "name another `out`, or use the run's options to go on with it"
            )
    raise InputError(f"{path} was changed by hand; name another `out`")


def read_settings(folder: Path) -> dict[str, Any]:
    """Read the settings that `claim_folder` wrote, with a fingerprint and the provenance; else an InputError."""
    path = folder / SETTINGS
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        int(found["n"]), found[_FINGERPRINT], dict(found["provenance"])
    except FileNotFoundError as error:
        raise InputError(f"{folder} is not the folder of a run: it has no {SETTINGS}; name another") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not the settings of a run; name another `out` or folder") from error
    return found


_WORDS: Final = {
    "weights": "digest of weights, config and tokenizer",
    "prompts": "digest of the tasks and prompts (`limit`, `task_ids`, `data`, `shots`)",
    "rows": "`rows`",
    "n": "`n`",
}


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Unit:
    tasks: tuple[int, ...]  # their numbers in the run
    first: int  # index of each task's first sample
    count: int  # samples of each task

    def seed(self, run_seed: int, task_ids: Sequence[str]) -> int:
        text = "\n".join([str(run_seed), str(self.first), *(task_ids[task] for task in self.tasks)])
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1

    def keys(self, task_ids: Sequence[str]) -> list[tuple[str, int]]:
        return [(task_ids[task], self.first + offset) for task in self.tasks for offset in range(self.count)]


def units_of(tasks: int, n: int, rows: int) -> list[Unit]:
    """Divide `n` samples of each task into calls of at most `rows` rows, of several tasks where these fit."""
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

    See `work`; a unit is drawn when the next is asked for. Samples of a unit that an interruption left incomplete are
    removed first, and so are repeated ones.
    """
    keys = [frozenset(unit.keys(task_ids)) for unit in units]
    done: set[tuple[Any, Any]] = set()
    lines = Lines(lambda: sample_files(folder))

    def is_done(number: int) -> bool:
        if not done >= keys[number]:
            done.update(map(sample_key, lines.new()))
        return done >= keys[number]

    whole = folder / SAMPLES
    for path in sample_files(folder):
        with suppress(_HeldError, FileNotFoundError), exclusive(path, _HeldError()):  # it may have been merged
            _remove_incomplete(path, keys)
    with work(whole, len(units), is_done, shared=shared, held=_held(whole)) as (file, pending):
        done.update(map(sample_key, lines.new()))
        yield file, (units[number] for number in pending), sum(len(of_unit & done) for of_unit in keys)


def _held(path: Path) -> InputError:
    return InputError(f"another process draws samples into {path}; wait for it, or name another `out`")


def _remove_incomplete(path: Path, units: Sequence[frozenset[tuple[str, int]]]) -> None:
    lines = list(read_jsonl(path))
    found: dict[tuple[Any, Any], dict[str, Any]] = {}
    for line in lines:
        found.setdefault(sample_key(line), line)
    whole = {key for keys in units if found.keys() >= keys for key in keys}
    kept = [line for key, line in found.items() if key in whole]
    if len(kept) < len(lines):
        write_text(path, json_lines(kept))


def sample_key(line: dict[str, Any]) -> tuple[Any, Any]:
    return line.get("task_id"), line.get("index")


def merged_samples(folder: Path, task_ids: Sequence[str], n: int) -> list[Sample]:
    """Read the samples of a run, `n` for each task, by task and index; files of several processes become one.

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
                f"the files in {folder} hold {len(merged):,} of {n * len(task_ids):,} samples; draw the others first"
            )
        whole = folder / SAMPLES
        with exclusive(whole, _held(whole)):
            write_text(whole, json_lines(merged))
            for path in files:
                if path != whole:
                    path.unlink(missing_ok=True)
    return merged
