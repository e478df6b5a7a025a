"""Cases of a test, of which `make test` runs some and `make test-exhaustive` the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def exhaustive_but(kept: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """Cases of a parametrized test: the kept ones as they are, and the others marked for `make test-exhaustive`."""
    return [case if case in kept else pytest.param(*_arguments(case), marks=pytest.mark.exhaustive) for case in cases]


def _arguments(case: Any) -> tuple[Any, ...]:
    return case if type(case) is tuple else (case,)
