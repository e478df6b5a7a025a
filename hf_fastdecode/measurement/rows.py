"""Measurements, the rows of CSV files: every one carries the device, the versions, the commit and the command."""

from __future__ import annotations

import hashlib
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..attention.torch_operators import BACKEND_VARIABLE

if TYPE_CHECKING:
    import torch

Measurement = dict[str, str]
"""A line of results: its columns by name, as a CSV file has them."""

# Options that say nothing about what is measured, and how many words their values are.
_SILENT_OPTIONS = {"out": 1, "plot": 0}


def provenance(device: torch.device | str, *, backend: str | None = None) -> dict[str, Any]:
    """The columns that every measurement on a device begins with.

    A backend of the environment that changes what runs stands in front of the command, as in a shell.
    """
    import torch  # here, since rows are also read where its seconds would be lost
    import transformers

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
        "hf_fastdecode": __version__,
        "commit": _commit(),
        "command": " ".join([*([f"{BACKEND_VARIABLE}={backend}"] if backend else []), _program(), *_arguments()]),
    }


def _arguments() -> list[str]:
    """The arguments without those that say nothing about what is measured."""
    arguments: list[str] = []
    skip = 0
    for argument in sys.argv[1:]:
        name, given, _ = argument.removeprefix("--").partition("=")
        if skip:
            skip -= 1
        elif argument.startswith("--") and name in _SILENT_OPTIONS:
            skip = 0 if given else _SILENT_OPTIONS[name]
        else:
            arguments.append(argument)
    return arguments


def _program() -> str:
    """How this process was started, such as ``python -m hf_fastdecode``."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None:
        return Path(sys.argv[0]).name
    return f"python -m {spec.name.removesuffix('.__main__')}"


def _commit() -> str:
    """The commit measured; behind it, when files have changed since, ``+`` and a hash of the sources.

    ``$COMMIT`` when it is set, as where the files were copied from a repository.
    """
    if given := os.environ.get("COMMIT"):
        return given
    package = Path(__file__).resolve().parents[1]

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(command, cwd=package, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--", ":/*.py")
        return git("rev-parse", "--short=12", "HEAD") + (f"+{_hash_of_sources(package)}" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return f"unknown+{_hash_of_sources(package)}"


def _hash_of_sources(package: Path) -> str:
    """A hash of the package's files, and of those beside the module that ``python -m`` started."""
    folders, spec = {package}, getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None and spec.origin is not None:
        folders.add(Path(spec.origin).resolve().parent)
    digest = hashlib.sha256()
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:8]
