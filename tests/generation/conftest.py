import pytest

from ..tiny_models import tiny_model


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama-gqa")
