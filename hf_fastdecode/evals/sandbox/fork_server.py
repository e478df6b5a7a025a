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

from .launch import Backend, Limits, SandboxError, python_command, view_of
from .process import SETUP_SECONDS, Command, Ended, SandboxedProcess, kill_first_process, wait_for

_LOOP: Final = Path(__file__).with_name("fork_loop.py")
_LONGEST_REPORT: Final = 4096


@dataclass(frozen=True)
class ForkedPython:
    """The initial state of each forked process.

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
        self._prepared: _Fork | None = None
        self._limits: Limits | None = None  # of the last process
        self.close = weakref.finalize(self, _close, self._command, ours)
        self.close.atexit = False  # it dies with its thread, and an exit may be that of a fork of this process

    @property
    def pid(self) -> int:
        """The host's process whose descendants are the interpreter and what it forks."""
        return self._command.pid

    def fork(self, limits: Limits) -> SandboxedProcess:
        """A new process within limits; a SandboxError if there is none, after which the server is of no use."""
        try:
            fork = self._taken_prepared(limits)
            if fork is None:
                fork = _Fork(self._control, limits)
                fork.await_ready()
        except (OSError, SandboxError) as error:
            said = self._command.said().decode(errors="replace").strip().splitlines()
            raise SandboxError(f"no process can be forked: {said[-1] if said else error}") from error
        self._limits = limits
        return SandboxedProcess(fork, limits)

    def prepare(self) -> None:
        """Have the next process made from now on, within the limits of the last one; `fork` then gives that."""
        if self._prepared is None and self._limits is not None:
            with contextlib.suppress(OSError):  # `fork` will tell
                self._prepared = _Fork(self._control, self._limits)

    def _taken_prepared(self, limits: Limits) -> _Fork | None:
        """The prepared process, if there is one within these limits that lives."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.await_ready()
            if prepared.limits != limits or prepared.has_ended():
                prepared.kill()
                prepared.close()
                return None
        return prepared

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _Fork:
    """Asks a fork server, at the other end of a socket, for a process, and holds it."""

    kills_for_memory = False

    def __init__(self, control: socket.socket, limits: Limits):
        self.limits = limits
        self.pid = self._first = -1
        self._end: Ended | None = None
        request = json.dumps({"scratch_bytes": limits.scratch_bytes, "resources": limits.resources()})
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = (os.pipe() for _ in range(3))
        self.stdin: IO[bytes] = os.fdopen(to_stdin, "wb", 0)
        self.stdout: IO[bytes] = os.fdopen(from_stdout, "rb", 0)
        self.stderr: IO[bytes] = os.fdopen(from_stderr, "rb", 0)
        # What holds the process in the sandbox writes there, and nobody else does.
        self._report, reports = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._report.settimeout(SETUP_SECONDS)
        try:
            socket.send_fds(control, [request.encode()], [stdin, stdout, stderr, reports.fileno()])
        except OSError:
            self.close()
            raise
        finally:
            for end in (stdin, stdout, stderr):
                os.close(end)
            reports.close()  # so that reports end with those who write them

    def await_ready(self) -> None:
        """Wait until its sandbox is set up; a SandboxError if that fails."""
        try:
            said, descriptors, _, _ = socket.recv_fds(self._report, _LONGEST_REPORT, 1)
            if said != b"ready" or not descriptors:
                raise SandboxError(said.decode(errors="replace") or "its sandbox was not set up")
            (self._first,) = descriptors
            os.set_inheritable(self._first, False)
            self.pid = _pid_of(self._first)
        except BaseException:
            self.close()
            raise

    def has_ended(self) -> bool:
        return wait_for(self._first, 0)

    def close(self) -> None:
        for one in (self.stdin, self.stdout, self.stderr, self._report):
            one.close()

    def ended(self, *, wait: bool = False) -> Ended | None:
        """How it ended, None while it runs; a SandboxError if nobody reports that any more."""
        if self._report.fileno() >= 0 and wait_for(self._report.fileno(), SETUP_SECONDS if wait else 0):
            with self._report, contextlib.suppress(ValueError):  # no numbers, but an error or nothing
                self._end = Ended(*json.loads(self._report.recv(_LONGEST_REPORT)))
        if self._report.fileno() < 0 and self._end is None:
            raise SandboxError("what held the sandbox ended before it")
        return self._end

    def kill(self) -> Ended | None:
        if self._first >= 0:
            first, self._first = self._first, -1
            kill_first_process(first)
        self._report.close()  # a report on a killed one counts no CPU time
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
