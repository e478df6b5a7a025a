"""What is made once for all workers of pytest-xdist, each of which else sets up its own session."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from typing import TypeVar

import pytest
from filelock import FileLock

Made = TypeVar("Made")


def made_once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[], Made]) -> Made:
    """What `make` returns, which the first worker that asks makes; the others wait, and get a copy."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make()
    file = tmp_path_factory.getbasetemp().parent / f"{name}.pickle"
    with FileLock(f"{file}.lock"):
        if not file.exists():
            file.write_bytes(pickle.dumps(make()))
    found: Made = pickle.loads(file.read_bytes())
    return found
