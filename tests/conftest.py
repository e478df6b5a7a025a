"""Fixtures and settings of all tests."""

import gc
import os
import random

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

from .interpreter import make_faster

# Examples take longer where others run beside them, and are the same in every run.
settings.register_profile("tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # the kernels' tests run their code on the CPU
    make_faster()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers that each take every core spend their time waiting for each other
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each starts further processes that compile


def pytest_collection_modifyitems(items):
    """Skip what needs a CUDA device where there is none."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    """Let numbers be those that a test draws alone, whichever others its process ran before."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_finish():
    """Let collections of garbage that code and tests ask for leave out modules and tests: a third of a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def short_calls_share():
    """Calls of tiny models, which are faster in stock on the CPU, share all the same; see `share_short_calls`."""
    from .short_calls import share_short_calls

    share_short_calls()


@pytest.fixture
def model():
    """A model of the test's own."""
    from .tiny_models import tiny_model  # not before it is known whether kernels are interpreted

    return tiny_model("llama-gqa")


@pytest.fixture
def undrawn(monkeypatch):
    """Leave the picture of a conversion empty: drawing it takes longer than converting a tiny model."""
    from hf_fastdecode.conversion import convert

    monkeypatch.setattr(convert, "draw_report", lambda report, path: path.touch())
