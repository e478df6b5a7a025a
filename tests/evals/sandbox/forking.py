"""What tests of forked processes share: programs that run in them, and the interpreters that fork them."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from hf_fastdecode.evals.sandbox import (
    ForkedPython,
    ForkServer,
    Limits,
    SandboxedProcess,
)
from hf_fastdecode.evals.sandbox.launch import children_of
from hf_fastdecode.evals.scoring.python import _IMPORTS

LIMITS = Limits(cpu_seconds=10, wall_seconds=30, memory_bytes=256 << 20, output_bytes=1 << 20, scratch_bytes=4 << 20)
ANY = ForkedPython(_IMPORTS, (), "exec(sys.stdin.read())")
"""Runs what it reads; `sys` is a name of the statements before."""


def run(server: ForkServer, source: str, limits: Limits = LIMITS) -> str:
    """What a program writes that a new process runs to its end."""
    with server.fork(limits) as process:
        said = output(process, source)
        assert process.wait() == 0, process.stderr.decode()
    return said


def output(process: SandboxedProcess, source: str) -> str:
    process.send(source.encode())
    process.close_input()
    said = b""
    while data := process.receive():
        said += data
    return said.decode()


def interpreter(server: ForkServer) -> int:
    """The process that forks, by its number here: the first one in a PID namespace of its own."""
    pid = server.pid
    while len(numbers_of(pid)) == len(numbers_of(os.getpid())):
        (pid,) = children_of(pid)
    return pid


def numbers_of(pid: int) -> list[str]:
    """The numbers of a process in each PID namespace, from the outermost that is seen here."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split()[1:] for line in lines if line.startswith("NSpid:"))


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def killed(pid: int) -> None:
    """Kill an interpreter, and wait until it is gone with all that it has forked."""
    os.kill(pid, signal.SIGKILL)
    while lives(pid):
        time.sleep(0.001)
