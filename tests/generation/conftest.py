import pytest

from ..settings import merging_in_pairs, uncaptured  # noqa: F401
from ..tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")
