"""Runs the slim decode kernel on clusters on a CPU: its source, with an emulation of the instructions that it uses.

Every thread of some clusters runs as a fiber, and the rest of `slim_decode` as it is. This finds wrong results, reads
and writes at the wrong time, and threads that wait for each other. In some runs the warps of one role fall as far
behind as barriers allow. Fences and registers are not emulated.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_fastdecode.kernels.slim_decode import api, cluster
from hf_fastdecode.kernels.slim_decode.cluster import ClusterShape

CLUSTERS = 2
_RESULTS = slice(11, 13)  # of the arguments: averages and log-sum-exp
STARVED = (0, 1, 3)  # roles, see `run.cpp`: those that add, score and rotate
_HERE = Path(__file__).parent
_SOURCES = Path(cluster.__file__).with_name("cuda")
_HEADERS = ("layout.cuh", "scales.cuh", "scores.cuh", "averages.cuh")
_REPLACED = (
    ("extern __shared__ __align__(1024) char memory[];", "char* const memory = blocks[current->block].memory;"),
    (
        'asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(base + at), "r"(arrivals));',
        "make_barrier(base + at, arrivals);",
    ),
    ('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', ""),
    ('asm volatile("" : "+f"(part)::"memory");', ""),
    ('asm volatile("" : "+f"(sums[b][n][i])::"memory");', ";"),
)


class _Map(ctypes.Structure):
    """`TensorMap` of ``instructions.h``."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("sizes", ctypes.c_int64 * 4),
        ("strides", ctypes.c_int64 * 4),
        ("box", ctypes.c_int * 4),
        ("padding", ctypes.c_char * 40),
    )


def _tensor_map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], *, bf16: bool
) -> _Map:
    """As `cluster.tensor_map`, with the driver's bounds."""
    assert not any(place % 16 for place in (address, *strides))
    assert max(box) <= 256
    assert box[-1] == 64
    sizes, boxes = ((ctypes.c_int64 * 4)(*reversed(shape)), (ctypes.c_int * 4)(*reversed(box)))
    return _Map(address, sizes, (ctypes.c_int64 * 4)(0, *reversed(strides)), boxes)


class _Kernel:
    def __init__(self, run: Callable[..., int]):
        self.run = run

    def launch(self, count: int, arguments: list[Any], device: torch.device) -> None:
        """As `CudaKernel.launch`."""
        results = []
        for seed, starved in enumerate((-1, *STARVED)):  # other orders, which must not matter
            assert self.run(count, seed, starved, *map(_argument, arguments)) == 0, "threads wait for each other"
            results.append([part.view(torch.int32).clone() for part in arguments[_RESULTS]])
            assert all(torch.equal(*pair) for pair in zip(results[0], results[-1])), "results depend on the order"


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        return ctypes.c_void_p(value.data_ptr())
    if isinstance(value, _Map):
        return ctypes.byref(value)
    return ctypes.c_longlong(value) if isinstance(value, int) else ctypes.c_float(value)


@cache
def _compiled(shape: ClusterShape, folder: Path) -> _Kernel:
    text = "".join(_SOURCES.joinpath(name).read_text(encoding="utf-8") for name in (*_HEADERS, "cluster.cu"))
    text = re.sub(r'^#(include ".*\.cuh"|pragma once)$', "", text, flags=re.MULTILINE)
    for given, emulated in _REPLACED:
        assert text.count(given) == 1, given
        text = text.replace(given, emulated)
    folder = folder / f"kernel{hash(shape):x}"
    folder.mkdir()
    (folder / "kernel.inc").write_text(text, encoding="utf-8")
    numbers = [f"-D{name}={value}" for name, value in shape.numbers().items()]
    options = ["-std=c++20", "-O2", "-w", "-shared", "-fPIC", f"-I{folder}"]
    command = ["g++", *options, *numbers, "-o", str(folder / "kernel.so"), str(_HERE / "run.cpp")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return _Kernel(ctypes.CDLL(str(folder / "kernel.so")).run)


def emulate(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Let `slim_decode` run its kernel on clusters on a CPU; it is compiled in a folder."""
    monkeypatch.setattr(cluster, "tensor_map", _tensor_map)
    monkeypatch.setattr(api, "cluster_kernel", lambda shape, _: (_compiled(shape, folder), CLUSTERS))
    monkeypatch.setattr(api, "_has_clusters", lambda _: True)
