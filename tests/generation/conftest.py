import pytest

from hf_fastdecode.generation.steps import modes

from ..settings import merging_in_pairs  # noqa: F401
from ..tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let captured modes run where kernels are interpreted."""
    monkeypatch.setattr(modes, "capture_reason", lambda *_: None)
