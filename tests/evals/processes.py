"""Processes of this machine, programs that run to their end in a sandbox, and interpreters that fork."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hf_fastdecode.evals.sandbox import ForkedPython, ForkServer, LimitExceeded, Limits, SandboxedProcess, SandboxError
from hf_fastdecode.evals.sandbox.backends import Unshare
from hf_fastdecode.evals.sandbox.launch import Launch, View, children_of, processes_with
from hf_fastdecode.evals.scoring.python import _IMPORTS


def running(token: str) -> bool:
    """Whether a process has this argument."""
    return bool(processes_with(token))


@dataclass(frozen=True)
class Outcome:
    """The outcome of a sandboxed program."""

    # ``ok`` for exit code 0, ``failed`` for any other end of its own, or the limit that it exceeded
    status: Literal["ok", "failed", "timeout", "memory", "output", "sandbox_error"]
    exit_code: int | None = None  # 128 + the number of a signal; None where it was killed for a limit or never ran
    stdout: bytes = b""
    stderr: bytes = b""
    detail: str = ""  # one line about the end; empty for ``ok``
    cpu_seconds: float = 0.0


def outcome(
    start: Callable[[], SandboxedProcess], stdin: bytes = b"", after_output: tuple[float, float] | None = None
) -> Outcome:
    """Run a program to its end; from its first output on, within these seconds of CPU time and of the clock."""
    try:
        process = start()
    except SandboxError as error:
        return Outcome("sandbox_error", detail=str(error))
    output = b""
    with process:
        try:
            with contextlib.suppress(BrokenPipeError):
                process.send(stdin)
            process.close_input()
            while data := process.receive():
                if after_output and not output:
                    process.renew(*after_output)
                output += data
            code = process.wait()
        except LimitExceeded as error:
            found = Outcome(error.status, None, output, detail=error.detail)
        else:
            found = Outcome("failed" if code else "ok", code, output, detail=_detail(code))
    return replace(found, stderr=bytes(process.stderr), cpu_seconds=process.cpu_seconds)


@dataclass(frozen=True)
class Edited(Unshare):
    """The back end `unshare`, whose command lines were changed."""

    edits: tuple[tuple[str, str], ...] = ()  # old and new texts within arguments
    name: str = "edited"

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        return self._edited(super().launch(argv, view, limits))

    def launch_fork_server(self, argv: Sequence[str], view: View) -> Launch:
        return self._edited(super().launch_fork_server(argv, view))

    def _edited(self, launch: Launch) -> Launch:
        command = launch.command
        for old, new in self.edits:
            command = [word.replace(old, new) for word in command]
        return replace(launch, command=[word for word in command if word])


def _detail(code: int) -> str:
    if code <= 128:
        return f"ended with exit code {code}" if code else ""
    return f"ended by signal {code - 128}"


LIMITS = Limits(cpu_seconds=10, wall_seconds=30, memory_bytes=256 << 20, output_bytes=1 << 20, scratch_bytes=4 << 20)
ANY = ForkedPython(_IMPORTS, (), "exec(sys.stdin.read())")
"""Runs what it reads; `sys` is a name of the statements before."""


def run(server: ForkServer, source: str, limits: Limits = LIMITS) -> str:
    """The output of a program that a new process runs to its end."""
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
