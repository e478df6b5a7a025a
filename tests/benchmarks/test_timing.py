"""The timing core on the CPU."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import operator_time as ceilings
from benchmarks.operator_time import Ceilings, measure_ceilings, time_operator
from benchmarks.ops.cases import shared
from hf_fastdecode.measurement.calls import cpu_memory, percentiles, wall_samples

CPU = torch.device("cpu")


def test_percentiles_by_hand():
    assert percentiles([3.0]) == (3.0, 3.0, 3.0)
    assert percentiles([4.0, 1.0]) == (1.0, 2.5, 4.0)
    assert percentiles([float(value) for value in range(11)]) == (2.0, 5.0, 8.0)


def test_memory_is_some():
    assert 2**20 < cpu_memory() < 2**50


def test_time_of_one_call_and_its_last_output(nap):
    outputs = iter(range(1000))

    def first():
        nap(2e-3)
        return torch.tensor(next(outputs))

    times, output = time_operator([first, lambda: torch.zeros(1)], CPU, budget_s=0.01)
    assert times == pytest.approx((1e-3,) * 3, rel=1e-2)
    assert int(output) == next(outputs) - 1


def test_a_budget_ends_repetition(nap):
    samples = wall_samples(lambda: nap(2e-3), CPU, repeats=50, budget_s=1e-3)
    assert len(samples) == 1
    assert len(wall_samples(lambda: None, CPU, repeats=3, budget_s=10.0)) == 3


def test_warming_calls_do_not_count(nap):
    states = [False, True, True, False, False]
    naps = iter([0.05, 0.05, 0.05, 0.0, 0.0])
    samples = wall_samples(lambda: nap(next(naps)), CPU, repeats=2, budget_s=10.0, warming=lambda: states.pop(0))
    assert states == []
    assert len(samples) == 2
    assert max(samples) < 0.05
    assert len(wall_samples(lambda: None, CPU, repeats=3, budget_s=10.0, warming=lambda: True)) == 3


def test_the_floor_is_the_larger_of_bytes_and_arithmetic():
    case = shared(2, 10, 2, 4, 2, head_dim=16)
    assert Ceilings(1.0, 1e30).floor_s(case, 2) == case.bytes(2)
    assert Ceilings(1e30, 1.0).floor_s(case, 2) == case.flops


def test_ceilings_of_this_machine():
    found = measure_ceilings(CPU)
    assert 1e7 < found.bytes_per_s < 1e13
    assert 1e7 < found.flops_per_s < 1e15


def test_ceilings_of_a_gpu_are_medians_of_bursts(monkeypatch):
    """A clock that falls for one measurement, or rises, does not decide."""
    measured = iter([9.0, 1.0, *[2.0] * 5, 3.0, 0.5])
    pauses = []
    monkeypatch.setattr(ceilings, "time_operator", lambda calls, device: (percentiles([next(measured)]), None))
    monkeypatch.setattr(ceilings.time, "sleep", pauses.append)
    assert ceilings._seconds(lambda: None, SimpleNamespace(type="cuda")) == 2.0
    assert next(measured, None) is None
    assert pauses == [ceilings._PAUSE_S] * 9


@pytest.mark.gpu
def test_the_time_of_a_stream_on_a_gpu():
    x = torch.randn(2**27, device="cuda")
    calls = [lambda: torch.add(x, 1.0, out=x)]
    times, output = time_operator(calls, torch.device("cuda"))
    assert output is x
    assert times.p20 <= times.p50 <= times.p80
    assert 5e11 < 2 * x.nbytes / times.p50 < 1e13
