"""Memory at the same addresses in every call: a host's, and a GPU's by a driver that stands for CUDA's."""

from __future__ import annotations

import ctypes
from contextlib import ExitStack, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch

from hf_fastdecode.parallel.gathering import memory

GRANULARITY = 1 << 21


class Driver:
    """Counts what is mapped; functions named in `failing` return their error."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.failing: dict[str, int] = {}

    def __getattr__(self, name: str) -> Any:
        def call(first: Any, *others: Any) -> int:
            self.calls.append(name.removeprefix("cuMem"))
            if name == "cuMemGetAllocationGranularity":
                first._obj.value = GRANULARITY
            elif name == "cuMemAddressReserve":
                assert others[0].value == 3 * GRANULARITY
                first._obj.value = 1 << 40
            elif name == "cuMemMap":
                assert first.value == 1 << 40
            return self.failing.get(name, 0)

        return call


@pytest.fixture
def driver():
    found = Driver()
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ctypes, "CDLL", return_value=found))
        for name, value in {
            "device": lambda device: nullcontext(),
            "current_device": lambda: 0,
            "mem_get_info": lambda device: (1 << 40, 1 << 40),
            "synchronize": lambda: found.calls.append("synchronize"),
        }.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value))
        stack.enter_context(mock.patch.object(torch, "as_tensor", return_value=torch.zeros(3)))
        yield found


def test_structures_are_those_of_the_driver():
    assert ctypes.sizeof(memory._Properties) == 32
    assert ctypes.sizeof(memory._Access) == 12


def test_a_gpu_maps_memory_for_each_call(driver):
    made = memory.memory_on(torch.device("cuda", 0), 2 * GRANULARITY + 1)
    assert driver.calls == ["GetAllocationGranularity", "AddressReserve", "Create", "Map", "SetAccess"]
    for _ in range(2):
        driver.calls.clear()
        made.free()
        made.free()
        made.take()
        made.take()
        assert driver.calls == ["synchronize", "Unmap", "Release", "Create", "Map", "SetAccess"]


@pytest.mark.parametrize(
    ("name", "code", "error", "undone"),
    [
        ("cuMemCreate", 2, torch.OutOfMemoryError, []),
        ("cuMemMap", 1, RuntimeError, ["Release"]),
        ("cuMemSetAccess", 2, torch.OutOfMemoryError, ["synchronize", "Unmap", "Release"]),
    ],
)
def test_nothing_is_left_mapped_after_an_error(driver, name, code, error, undone):
    made = memory.memory_on(torch.device("cuda", 0), 2 * GRANULARITY + 1)
    made.free()
    driver.calls.clear()
    driver.failing[name] = code
    with pytest.raises(error):
        made.take()
    last = driver.calls.index(name.removeprefix("cuMem"))
    assert driver.calls[last + 1 :] == undone


@pytest.mark.parametrize("kind", [memory.OfHost, lambda nbytes: memory.Allocated(nbytes, torch.device("cpu"))])
def test_memory_of_a_host(kind):
    made = kind(5000)
    address = made.vector.data_ptr()
    for _ in range(2):
        made.take()
        made.vector.fill_(7)
        assert made.vector.eq(7).all()
        made.free()
    if isinstance(made, memory.OfHost):
        made.take()
        assert made.vector.data_ptr() == address
        assert made.vector.eq(0).all()  # the kernel has had it
