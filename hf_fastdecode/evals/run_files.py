"""The files of a run's folder: their names, writing them whole, and keeping other processes off them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, TextIO

from filelock import FileLock, Timeout

from ..errors import CommandError

SETTINGS: Final = "settings.json"
SAMPLES: Final = "samples.jsonl"
VERDICTS: Final = "verdicts.jsonl"
LATENCY: Final = "latency.csv"


def sample_files(folder: Path) -> list[Path]:
    """The files of samples in a run's folder: of one process, or of its shards."""
    return sorted([*folder.glob(SAMPLES), *folder.glob("samples-*-of-*.jsonl")])


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Have a file written under a temporary name and rename it, so that an interruption leaves the old one.

    When this returns, the disk has the new one. The temporary name begins with a dot, so that no glob of samples or
    results matches it, and ends as the file's own, by which matplotlib chooses the format.

    Args:
        path: Of the file; its folder is made if need be.
        write: Writes to the path that it is given.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.stem}.partial{path.suffix}")
    partial.unlink(missing_ok=True)  # left by a process that was killed
    try:
        write(partial)
        with partial.open("r+b") as file:  # before the rename, which else may reach the disk without the content
            os.fsync(file.fileno())
        os.replace(partial, path)
        _sync_folder(path.parent)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _sync_folder(folder: Path) -> None:
    """Have the disk take over names in a folder."""
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open one
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems refuse it for folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, write: Callable[[TextIO], object]) -> Path:
    """`write_whole` of an open text file, in UTF-8; what has no UTF-8 is escaped."""

    def whole(partial: Path) -> None:
        with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            write(file)

    return write_whole(path, whole)


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Keep other processes and threads off a file, as long as they ask by this function too.

    The lock is on a hidden file beside it, which stays there: to remove it would let two processes hold it at once.

    Args:
        path: Of the file; its folder is made if need be.
        what: A process does with the file, such as ``scores into``.

    Raises:
        CommandError: Another one holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(path.with_name(f".{path.name}.lock"), timeout=0)
    try:
        lock.acquire()
    except Timeout as error:
        raise CommandError(f"another process {what} {path}; wait for it, or name another --out") from error
    try:
        yield
    finally:
        lock.release()
