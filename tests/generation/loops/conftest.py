"""How captured modes run where kernels are interpreted."""

import pytest

from hf_fastdecode.generation.steps import loop_passes, modes


@pytest.fixture
def uncaptured(monkeypatch):
    """Let captured modes run where kernels are interpreted."""
    for module in (modes, loop_passes):
        monkeypatch.setattr(module, "capture_reason", lambda *_: None)
