"""A process of its own compiles kernels on disk: those that launches then need, and it ends with who started it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from hf_fastdecode.kernels import compiling_process
from hf_fastdecode.kernels.compiling_process import CompilingProcess

from ..fresh_processes import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it runs on Linux")

BEGIN = """
import os, signal, time
from contextlib import suppress
from unittest.mock import patch

import torch
import triton
from tests.kernels.compile_all import CUDA, Activation, Claimed, NormForm, gated_product, pretending, rms_norm
from hf_fastdecode.kernels import compiling_process
from hf_fastdecode.kernels.ahead import listed
from hf_fastdecode.kernels.compiling_process import CompilingProcess
from tests.kernels.test_compiling_process import runs

os.sched_getaffinity = lambda _: {0, 1}
compiling_process._BEGIN = compiling_process._BEGIN.replace("os.nice(10)", "")  # it would wait for other tests


def launch():
    x = torch.empty(40, 4096, dtype=torch.bfloat16, device=CUDA)
    rms_norm(x, x[0].as_subclass(Claimed), 1e-5, NormForm.ROUNDED)
    gated_product(x, x, x, (None, None), Activation.SILU)  # of descriptors
"""

COMPILES = """
with pretending((9, 0)):
    launches = listed(launch)
    process = CompilingProcess.start(CUDA)
    process.compile(launches)
    while process.is_running():
        with suppress(FileNotFoundError):
            assert "libtorch" not in open(f"/proc/{process._process.pid}/maps").read()  # its import takes long
        time.sleep(0.05)
    assert process._process.returncode == 0, process._process.returncode
    found = []
    triton.knobs.compilation.listener = lambda **told: found.append(told["cache_hit"])
    launches = listed(launch)
    for kernel, arguments, options in launches:
        kernel.warmup(*arguments, grid=(1,), **options)
assert found == [True] * 2, found
"""

ENDS = """
with pretending((9, 0)):
    first, second, third = (CompilingProcess.start(CUDA) for _ in range(3))
    numbers = [one._process.pid for one in (first, second, third)]
    assert all(map(runs, numbers))
    first.end()
    assert not runs(numbers[0]) and not first.is_running()
    first.compile([])  # of no effect
    if os.fork() == 0:
        raise SystemExit  # ends none of its parent's
    assert os.wait()[1] == 0
    assert second.is_running() and runs(numbers[1])
    del second
    assert not runs(numbers[1])
    print(numbers[2], flush=True)
    if (starter := os.fork()) == 0:
        print(CompilingProcess.start(CUDA)._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(starter, 0)
"""


def runs(number: int) -> bool:
    """Whether a process of this number has not ended."""
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def in_a_process(folder: Path, *program: str) -> str:
    """What a program prints that runs where Triton compiles."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, *program],
        cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_launches_find_what_it_compiled(tmp_path: Path) -> None:
    in_a_process(tmp_path / "to be made", "-c", BEGIN + COMPILES)


def test_steps_of_every_size_find_their_kernels_begun(tmp_path: Path) -> None:
    """Of those that begin to compile after the first step; see `every_size`."""
    missing = json.loads(in_a_process(tmp_path, "-m", "tests.kernels.every_size"))
    assert missing == {"7b-mha": [], "8b-gqa": []}


def test_it_ends_when_asked_to_and_with_who_started_it(tmp_path: Path) -> None:
    numbers = list(map(int, in_a_process(tmp_path, "-c", BEGIN + ENDS).split()))
    deadline = time.monotonic() + 20
    assert len(numbers) == 2  # the last of a process that was killed
    while any(map(runs, numbers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(runs, numbers))
    assert not list(tmp_path.iterdir())


def test_none_where_kernels_are_not_compiled_or_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = torch.device("cuda", 0)
    monkeypatch.setattr(compiling_process, "interpreted", lambda: False)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("it started"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    assert CompilingProcess.start(torch.device("cpu")) is None
    pytest.importorskip("triton")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(compiling_process, "_triton_folder", lambda: file / "folder")
    assert CompilingProcess.start(cuda) is None
    monkeypatch.setattr(compiling_process, "_triton_folder", lambda: tmp_path)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert CompilingProcess.start(cuda) is None
