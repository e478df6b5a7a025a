"""What the device can do at most, measured in the run that quotes it: streaming memory, and multiplying matrices."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from ..operator_time import time_operator
from .cases import OpCase

# Clocks follow power: from one short measurement to the next, a GPU multiplies matrices a fifth faster or slower. One
# alone would move the floors of all operators, which are timed at many moments.
_BURSTS = 9
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Ceilings:
    """Rates of one device: of an element-wise kernel, and of a large product of bf16 matrices (on a CPU of fp32)."""

    bytes_per_s: float
    flops_per_s: float

    def floor_s(self, case: OpCase, itemsize: int) -> float:
        """Least seconds of a case: its bytes at one rate, or its arithmetic at the other."""
        return max(case.bytes(itemsize) / self.bytes_per_s, case.flops / self.flops_per_s)


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure both rates: on a GPU, medians of short measurements with pauses between them.

    The streaming kernel is an addition: a plain copy in a CUDA graph becomes a copy node, which is a third slower.
    """
    cuda = device.type == "cuda"
    x = torch.randn(2**28 if cuda else 2**21, device=device)
    y = torch.empty_like(x)
    streaming = _seconds(lambda: torch.add(x, 1.0, out=y), device)
    size, dtype = (8192, torch.bfloat16) if cuda else (256, torch.float32)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    multiplying = _seconds(lambda: a @ b, device)
    return Ceilings(2 * x.nbytes / streaming, 2 * size**3 / multiplying)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    if device.type != "cuda":
        return time_operator([call] * 4, device)[0].p50
    found = []
    for _ in range(_BURSTS):
        time.sleep(_PAUSE_S)
        found.append(time_operator([call] * 4, device)[0].p50)
    return median(found)
