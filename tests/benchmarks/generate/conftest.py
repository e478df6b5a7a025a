"""A bench and a model for tests that measure tiny cases on the CPU."""

import pytest
import torch

from benchmarks.generate.measure import GenerateBench
from hf_fastdecode.measurement.shapes import random_model

from .tiny_case import CPU


@pytest.fixture(scope="module")
def bench():
    return GenerateBench(CPU, repeats=1)


@pytest.fixture
def model():
    return random_model("tiny", CPU, torch.float32)
