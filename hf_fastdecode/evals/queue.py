"""Work that several processes share by a folder: each takes what none has, also what one left that was killed."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

from ..files import JsonlWriter, exclusive, read_jsonl

if os.name == "posix":
    import fcntl

_PAUSE: Final = 0.5
"""Seconds between two looks at what others are doing."""


class Queue:
    """Items by number, each done by one of the processes that share a file; a context manager.

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
        """Whether an item is this process's, until it ends or releases it."""
        if os.name != "posix":
            return True
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):  # another has it; systems differ in how they say so
            return False
        except OSError:  # a file system without locks, each with an error of its own
            return True
        return True

    def _release(self, number: int) -> None:
        """Let others do an item, if what this process did does not count for them."""
        if os.name == "posix":
            with suppress(OSError):
                fcntl.lockf(self._file, fcntl.LOCK_UN, 1, number)

    def __enter__(self) -> Queue:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()


class _HeldError(Exception):
    """Another process writes to a file."""


def part_files(whole: Path) -> list[Path]:
    """The files that processes which share the work of one file write, in order of their names."""
    return sorted(whole.parent.glob(f"{whole.stem}.part-*{whole.suffix}"))


def mend_unheld(files: Iterable[Path], mend: Callable[[Path], object]) -> None:
    """Call `mend` with each file that no process writes to."""
    for path in files:
        with suppress(_HeldError, FileNotFoundError), exclusive(path, _HeldError()):  # it may have been merged
            mend(path)


@contextmanager
def own_part(whole: Path) -> Iterator[JsonlWriter]:
    """The first part that no process writes to, for this one."""
    for number in itertools.count(1):
        path = whole.with_name(f"{whole.stem}.part-{number}{whole.suffix}")
        try:
            with exclusive(path, _HeldError()), JsonlWriter(path) as file:
                yield file
                return
        except _HeldError:
            continue


class Lines:
    """The lines of JSON files that other processes append to or replace. All come, some may come again."""

    def __init__(self, files: Callable[[], list[Path]]):
        self._files = files
        self._read: dict[Path, tuple[int, int]] = {}  # the file's inode, and how many bytes

    def new(self) -> Iterator[dict[str, Any]]:
        """Whole lines since the call before, and all of a file that was replaced."""
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
            if start:  # of our own writers
                yield from map(json.loads, content[:end].splitlines())
            else:
                yield from read_jsonl(path)
