"""What all attention tests run under."""

from __future__ import annotations

import pytest

from hf_fastdecode.attention.launch import plan as plans
from hf_fastdecode.attention.launch.costs import estimated_costs

from ..settings import merging_in_pairs, one_thread  # noqa: F401
from .forests import DEVICES


@pytest.fixture(scope="module", params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def on_hopper(monkeypatch):
    """Plans as a GPU of 132 multiprocessors would have them, for the launch parameters that a list holds."""
    from hf_fastdecode.kernels.forest_decode.api import Config  # imports triton, which may be missing

    config = [Config(128, block_n=128, stages=2, hopper=True, overlap_suffix=True)]
    monkeypatch.setattr(plans, "decode_config", lambda *_, **__: config[0])
    monkeypatch.setattr(plans, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(plans, "costs_of", lambda _: estimated_costs(132, 4.8e12))
    return config
