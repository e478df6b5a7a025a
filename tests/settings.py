"""Settings that folders of tests run under: their conftest.py imports those that it wants."""

from collections.abc import Iterator

import pytest
import torch

from .interpreter import merging_two_at_once


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Leave the parallelism to pytest's workers: small operators on more threads than cores wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package", autouse=True)
def merging_in_pairs() -> Iterator[None]:
    """Interpreted kernels take less time so."""
    with merging_two_at_once():
        yield


@pytest.fixture
def uncaptured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let captured modes run where kernels are interpreted."""
    monkeypatch.setattr("hf_fastdecode.generation.steps.modes.capture_reason", lambda *_: None)
