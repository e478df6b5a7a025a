"""Runs in processes of their own: killed at any moment, and several for one folder."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ..command_line import ROOT, needs_weights, run

OPTIONS = ("--limit", "3", "--n", "4", "--shots", "1", "--max-new-tokens", "24", "--rows", "2", "--device", "cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """As the processes of their own have: by more threads, sums may be rounded otherwise."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def start(out: Path, **variables: str) -> subprocess.Popen[bytes]:
    """`eval generate` in a fresh interpreter, with further environment variables."""
    command = [sys.executable, "-m", "hf_fastdecode", "eval", "generate", *OPTIONS, "--out", str(out)]
    streams = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"} | variables, **streams)


def generate(out: Path) -> None:
    """`eval generate` here: an interpreter takes longer to start than the run does."""
    result = run("eval", "generate", *OPTIONS, "--out", out)
    assert result.exit_code == 0, result.output


def finish(process: subprocess.Popen[bytes]) -> str:
    _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said.decode()
    return said.decode()


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The samples of a run that nothing disturbs."""
    out = tmp_path_factory.mktemp("unbroken")
    generate(out)
    return (out / "samples.jsonl").read_bytes()


@needs_weights
@pytest.mark.timeout(400)
def test_a_run_killed_at_any_moment_goes_on_to_the_same_bytes(unbroken: bytes, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    process = start(tmp_path)
    while process.poll() is None and not (path.exists() and path.stat().st_size):
        time.sleep(0.02)  # until it has drawn something
    time.sleep(random.uniform(0, 0.3))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert len(path.read_bytes()) < len(unbroken), "it was killed too late to show anything"
    generate(tmp_path)
    assert path.read_bytes() == unbroken


@needs_weights
@pytest.mark.timeout(400)
def test_launched_processes_share_a_run(unbroken: bytes, tmp_path: Path) -> None:
    from hf_fastdecode.evals.generation.samples_file import merged_samples

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": "2"}
    # As launchers start them; accelerate's starts a single one on a CPU.
    processes = [start(tmp_path, RANK=rank, LOCAL_RANK=rank, **place) for rank in ("0", "1")]
    for process in processes:
        assert "6 samples drawn into" in finish(process)
    merged_samples(tmp_path, ["101", "102", "103"], 4)
    assert (tmp_path / "samples.jsonl").read_bytes() == unbroken
