"""Rates of the kernels on devices that were not measured."""

import pytest
import torch

from hf_fastdecode.attention.launch.costs import _H200, costs_of, estimated_costs, memory_bandwidth


def test_other_devices_are_scaled():
    half = estimated_costs(66, 2.4e12)
    assert half.rate == _H200.rate / 2
    assert half.bandwidth == pytest.approx(_H200.bandwidth / 2)
    assert half.suffix_bandwidth == pytest.approx(_H200.suffix_bandwidth / 2)
    assert estimated_costs(66, None) == half


def test_memory_bandwidth():
    class H200:
        memory_clock_rate, memory_bus_width = 3201000, 6144

    assert memory_bandwidth(H200()) == pytest.approx(4.9e12, rel=0.01)
    assert memory_bandwidth(object()) is None


@pytest.mark.gpu
def test_costs_of_this_device():
    assert 1e11 < costs_of(torch.device("cuda", 0)).bandwidth < 2e13
