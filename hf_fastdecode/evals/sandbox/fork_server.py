"""Sandboxed Python processes that are forked from one interpreter: the host's side of `fork_loop`.

An interpreter that has imported what programs need runs in a sandbox of its own. For each process it makes new
namespaces, a writable folder and limits, as a back end does for a command line. Only limits and descriptors pass
through that interpreter; programs come over the streams that the host opens for each.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import socket
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import IO, Final, Self

from .command import SETUP_SECONDS, Command, Ended, kill_first_process, wait_for
from .launch import Backend, SandboxError, python_command, view_of
from .limits import Limits
from .process import SandboxedProcess

_LOOP: Final = Path(__file__).with_name("fork_loop.py")
_LONGEST_REPORT: Final = 4096


@dataclass(frozen=True)
class ForkedPython:
    """What each forked process begins with.

    Attributes:
        imports: Names of modules of the standard library.
        modules: Names and code of further modules, which are run once, before any process is forked.
        program: Python statements that each process runs then, in one line.
    """

    imports: tuple[str, ...]
    modules: tuple[tuple[str, CodeType], ...]
    program: str


class ForkServer:
    """An interpreter in a sandbox that forks sandboxed processes, one at a time; used in the thread that made it.

    A SandboxError if it cannot be set up, as under a back end without namespaces.
    """

    def __init__(self, backend: Backend, python: ForkedPython, *arguments: str):
        command, readable = python_command()
        text = f"{_LOOP.read_text(encoding='utf-8')}\nrun()\n{python.program}\n"
        launch = backend.launch_fork_server([*command, "-c", text, *arguments], view_of(readable))
        if launch is None:
            raise SandboxError(f"{backend.name} gives no rights to make namespaces")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, open(os.memfd_create("modules"), "wb") as file:
            file.write(marshal.dumps((python.imports, python.modules)))
            file.flush()
            socket.send_fds(ours, [b"modules"], [file.fileno()])
            try:
                self._command = Command(launch, stdin=theirs.fileno())
            except BaseException:
                ours.close()
                raise
        ours.settimeout(SETUP_SECONDS)
        self._control = ours
        self.close = weakref.finalize(self, _close, self._command, ours)
        self.close.atexit = False  # it dies with its thread, and an exit may be that of a fork of this process

    @property
    def pid(self) -> int:
        """The host's process whose descendants are the interpreter and what it forks."""
        return self._command.pid

    def fork(self, limits: Limits) -> SandboxedProcess:
        """A new process within limits; a SandboxError if there is none, after which the server is of no use."""
        request = json.dumps({"scratch_bytes": limits.scratch_bytes, "resources": limits.resources()})
        with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
            (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = (os.pipe() for _ in range(3))
            report, reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for end in (stdin, stdout, stderr):
                theirs.callback(os.close, end)
            theirs.enter_context(reports)
            ours.enter_context(report)
            ends = ((to_stdin, "wb"), (from_stdout, "rb"), (from_stderr, "rb"))
            streams = [ours.enter_context(os.fdopen(end, mode, 0)) for end, mode in ends]
            try:
                socket.send_fds(self._control, [request.encode()], [stdin, stdout, stderr, reports.fileno()])
                theirs.close()  # so that the report ends with those who write it
                process = SandboxedProcess(_Fork(report, *streams), limits)
            except (OSError, SandboxError) as error:
                said = self._command.said().decode(errors="replace").strip().splitlines()
                raise SandboxError(f"no process can be forked: {said[-1] if said else error}") from error
            ours.pop_all()
        return process

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _Fork:
    """Holds a forked process; `report` is the socket that its holder in the sandbox writes to."""

    kills_for_memory = False

    def __init__(self, report: socket.socket, stdin: IO[bytes], stdout: IO[bytes], stderr: IO[bytes]):
        self.stdin, self.stdout, self.stderr = stdin, stdout, stderr
        self._report: socket.socket | None = report
        self._end: Ended | None = None
        report.settimeout(SETUP_SECONDS)
        said, descriptors, _, _ = socket.recv_fds(report, _LONGEST_REPORT, 1)
        if said != b"ready" or not descriptors:
            raise SandboxError(said.decode(errors="replace") or "its sandbox was not set up")
        (self._first,) = descriptors
        os.set_inheritable(self._first, False)
        self.pid = _pid_of(self._first)

    def ended(self, *, wait: bool = False) -> Ended | None:
        """How it ended, None while it runs; a SandboxError if its holder ended before it."""
        if self._report is not None and wait_for(self._report.fileno(), SETUP_SECONDS if wait else 0):
            report, self._report = self._report, None
            with report, contextlib.suppress(ValueError):  # no numbers, but an error or nothing
                self._end = Ended(*json.loads(report.recv(_LONGEST_REPORT)))
        if self._report is None and self._end is None:
            raise SandboxError("what held the sandbox ended before it")
        return self._end

    def kill(self) -> Ended | None:
        """Kill all its processes and wait until they are gone; nothing happens where that was done."""
        if self._first >= 0:
            first, self._first = self._first, -1
            kill_first_process(first)
        with contextlib.suppress(SandboxError):
            self.ended(wait=True)
        return self._end


def _pid_of(pidfd: int) -> int:
    """The number of a process in this PID namespace; -1 where it has ended."""
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return next(int(line.partition(":")[2]) for line in lines if line.startswith("Pid:"))


def _close(command: Command, control: socket.socket) -> None:
    control.close()
    command.kill()
    for pipe in (command.stdin, command.stdout, command.stderr):
        pipe.close()
