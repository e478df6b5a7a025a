"""What all bench tests run under."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import pytest

from ..settings import one_thread  # noqa: F401


@pytest.fixture
def nap(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Moves the clock, which else advances by a microsecond for each look, however busy the machine is."""
    looks = itertools.count()
    slept: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 1e-6 * next(looks) + sum(slept))
    return slept.append
