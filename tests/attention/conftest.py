"""What all attention tests run under."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ..interpreter import merging_two_at_once
from .forests import DEVICES


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Leave the parallelism to pytest's workers: small operators on more threads than cores wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="package", autouse=True)
def merging_in_pairs() -> Iterator[None]:
    """Interpreted kernels take less time so."""
    with merging_two_at_once():
        yield
