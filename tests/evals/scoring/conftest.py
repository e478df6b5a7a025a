"""What tests of a module share, and end."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .python_tasks import end_runners


@pytest.fixture(scope="module", autouse=True)
def ended_runners() -> Iterator[None]:
    yield
    end_runners()
