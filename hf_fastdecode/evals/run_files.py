"""The files of a run's folder: their names, and writing them whole."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TextIO

SETTINGS: Final = "settings.json"
SAMPLES: Final = "samples.jsonl"
VERDICTS: Final = "verdicts.jsonl"
LATENCY: Final = "latency.csv"


def sample_files(folder: Path) -> list[Path]:
    """The files of samples in a run's folder: of one process, or of its shards."""
    return sorted([*folder.glob(SAMPLES), *folder.glob("samples-*-of-*.jsonl")])


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Have a file written under a temporary name and rename it, so that an interruption leaves the old one.

    Args:
        path: Of the file; its folder is made if need be.
        write: Writes to the path that it is given.

    Returns:
        The path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.stem}.partial{path.suffix}")
    try:
        write(partial)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_text(path: Path, write: Callable[[TextIO], object]) -> Path:
    """`write_whole` of an open text file, in UTF-8; what has no UTF-8 is escaped."""

    def whole(partial: Path) -> None:
        with partial.open("w", encoding="utf-8", errors="backslashreplace", newline="") as file:
            write(file)

    return write_whole(path, whole)
