"""Rows that say where they come from: every one carries the device, the versions, the commit and the command."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_fastdecode


def provenance(device: torch.device | str) -> dict[str, Any]:
    """The columns that every row begins with."""
    device = torch.device(device)
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    else:
        name = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    return {
        "device": name,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "hf_fastdecode": hf_fastdecode.__version__,
        "commit": _commit(),
        "command": " ".join(["python -m", _module(), *_arguments()]),
    }


def _arguments() -> list[str]:
    """The arguments but for where the rows go, which says nothing about them."""
    arguments = sys.argv[1:]
    if "--out" in arguments:
        at = arguments.index("--out")
        del arguments[at : at + 2]
    return arguments


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name


def _commit() -> str:
    """The commit measured, ``+`` behind it when files have changed since; ``$COMMIT`` where there is no repository."""
    if given := os.environ.get("COMMIT"):
        return given
    here = Path(__file__).parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/*.py")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as CSV, under a temporary name first, so that an interrupted run leaves the old file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
    partial.replace(path)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file written by `write_rows`."""
    with path.open(newline="") as file:
        return list(csv.DictReader(file))
