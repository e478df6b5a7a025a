"""Kernels compile before they are launched: all that a pass misses, and nothing that it has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

from hf_fastdecode.kernels.ahead import compile_in_background, compiled_ahead, launch

from ..fresh_processes import ROOT

OutOfResources = pytest.importorskip("triton.runtime.errors").OutOfResources

ON_A_PRETENDED_GPU = """
from contextlib import nullcontext
from threading import Event
from unittest.mock import patch

import torch
from tests.kernels.compile_all.pretended import CUDA, Claimed, Claiming, pretending
from triton.compiler import CompiledKernel
from triton.runtime.jit import KernelInterface

from hf_fastdecode.kernels import ahead
from hf_fastdecode.kernels.ahead import compile_in_background, compiled_ahead
from hf_fastdecode.kernels.pointwise.api import Activation, NormForm, gated, rms_norm
from hf_fastdecode.kernels.pointwise.kernel import gate, normalize

launched, runs, streams = [], [], []


def launch(kernel, grid):
    def record(*arguments, **options):
        assert isinstance(kernel.warmup(*arguments, grid=grid, **options), CompiledKernel)
        launched.append(kernel.__name__)

    return record


def run(form, activation, given=None):
    runs.append(form)
    given = x if given is None else given
    with Claiming():  # this thread too
        rms_norm(given, given[0].as_subclass(Claimed), 1e-5, form)
        gated(given, given, activation)
    return len(runs)


with (
    pretending((9, 0)),
    patch.object(KernelInterface, "__getitem__", launch),
    patch("torch.cuda.device", lambda device: nullcontext()),
    patch("torch.cuda.Stream", lambda device: streams.append(device)),
    patch("torch.cuda.stream", lambda stream: nullcontext()),
):
    x = torch.empty(3, 4096, dtype=torch.bfloat16, device=CUDA)
    assert compiled_ahead(lambda: run(NormForm.ROUNDED, Activation.SILU), CUDA) == 2
    assert launched == ["normalize", "gate"], launched
    assert compiled_ahead(lambda: run(NormForm.ROUNDED, Activation.SILU), CUDA) == 3
    assert compiled_ahead(lambda: run(NormForm.ROUNDED, Activation.GELU), CUDA) == 5
    assert launched == 2 * ["normalize", "gate"] + ["normalize", "normalize", "gate"], launched

    launched.clear()
    assert not streams
    compile_in_background(lambda: run(NormForm.WHOLE, Activation.GELU_TANH), CUDA)
    for thread in ahead._background:
        thread.join()
    assert compiled_ahead(lambda: run(NormForm.WHOLE, Activation.GELU_TANH), CUDA) == len(runs) == 7
    assert launched == ["normalize", "gate"], launched

    # A pass does not wait for what compiles in the background: it leaves that out, and runs again.
    launched.clear()
    begun, goes_on, other = Event(), Event(), x.to(torch.float16).as_subclass(Claimed)

    def compile_later(*arguments, **options):
        begun.set()
        assert goes_on.wait(60)
        return compile_now(*arguments, **options)

    def run_beside():
        assert begun.wait(60)
        found = run(NormForm.ROUNDED, Activation.SILU, other)
        assert goes_on.is_set() or not launched, launched
        goes_on.set()
        return found

    compile_now = gate.compile
    with patch.object(gate, "compile", compile_later), patch.object(normalize, "compile", compile_later):
        compile_in_background(lambda: run(NormForm.ROUNDED, Activation.SILU, other), CUDA)
        assert compiled_ahead(run_beside, CUDA) == len(runs) == 10
    assert launched == ["normalize", "gate"], launched

    # A pass that comes before they are listed waits for that, and compiles none of them once more.
    def list_late():
        begun.set()
        assert not goes_on.wait(0.2)
        run(NormForm.PLUS_ONE, Activation.GELU, other)

    def count(*arguments, **options):
        compiled.append(1)
        return compile_now(*arguments, **options)

    compiled = []
    for event in (begun, goes_on):
        event.clear()
    with patch.object(gate, "compile", count):
        compile_in_background(list_late, CUDA)
        assert begun.wait(60)
        compiled_ahead(lambda: goes_on.set() or run(NormForm.PLUS_ONE, Activation.GELU, other), CUDA)
    assert len(compiled) == 1, compiled

    assert streams == [CUDA]  # one of their own: none begins behind the work that a call has queued
    compile_in_background(lambda: 1 / 0, CUDA)
    with patch("threading.Thread.start", side_effect=RuntimeError("can't start new thread")):
        compile_in_background(lambda: 1 / 0, CUDA)
        assert compiled_ahead(lambda: run(NormForm.PLUS_ONE, Activation.SILU), CUDA) == len(runs)
print("done")
"""


def test_on_a_pretended_gpu(tmp_path: object) -> None:
    """In an interpreter of its own, where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", ON_A_PRETENDED_GPU],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["done"]


def test_elsewhere() -> None:
    """Where no kernel is compiled, a pass runs once, and nothing runs in the background."""
    runs: list[int] = []
    compile_in_background(lambda: pytest.fail("it ran"), torch.device("cpu"))
    assert compiled_ahead(lambda: runs.append(1) or len(runs), torch.device("cpu")) == 1


class Kernel:
    """Stands for a kernel whose tiles in flight fit up to a number, or that fails otherwise."""

    def __init__(self, most: int, error: type[Exception] | None = None):
        self.most, self.error, self.launched = most, error, list[int]()

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*, STAGES: int) -> None:
            if self.error is not None:
                raise self.error
            if self.most < STAGES:
                raise OutOfResources(278528, 232448, "shared memory")
            self.launched.append(STAGES)

        return run


def test_fewer_tiles_in_flight_where_these_do_not_fit() -> None:
    kernel = Kernel(2)
    for stages in (2, 4):
        assert launch(kernel, (1,), STAGES=stages)
    assert kernel.launched == [2, 2]
    with pytest.raises(OutOfResources, match="278528"):
        launch(Kernel(0), (1,), STAGES=3)
    with pytest.raises(ZeroDivisionError):
        launch(Kernel(1, ZeroDivisionError), (1,), STAGES=3)
