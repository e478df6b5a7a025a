"""Fixtures of the tests inside other programs; each file skips itself where its program is not installed."""

from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What other programs use of transformers may be deprecated; that is theirs to mend."""
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.filterwarnings("default::FutureWarning", "default::DeprecationWarning"))


@pytest.fixture(autouse=True)
def _fresh_accelerate_state() -> Iterator[None]:
    """accelerate keeps the mixed precision of a process's first Accelerator; each test chooses its own."""
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)
