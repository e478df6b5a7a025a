"""What all bench tests run under."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Leave the parallelism to pytest's workers: small operators on more threads than cores wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def nap(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock, which else advances by a microsecond for each look, however busy the machine is."""
    looks = itertools.count()
    slept: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-6 * next(looks) + sum(slept))
    return slept.append
