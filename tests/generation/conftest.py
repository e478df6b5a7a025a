from collections.abc import Iterator

import pytest

from hf_fastdecode.generation.steps import modes

from ..interpreter import merging_two_at_once
from ..tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let captured modes run where kernels are interpreted."""
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)


@pytest.fixture(scope="package", autouse=True)
def merging_in_pairs() -> Iterator[None]:
    """Interpreted kernels take less time so."""
    with merging_two_at_once():
        yield
