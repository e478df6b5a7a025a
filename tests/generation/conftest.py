from collections.abc import Iterator

import pytest

from ..interpreter import merging_two_at_once
from ..tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")


@pytest.fixture(scope="package", autouse=True)
def merging_in_pairs() -> Iterator[None]:
    """Interpreted kernels take less time so."""
    with merging_two_at_once():
        yield
