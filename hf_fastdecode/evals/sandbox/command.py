"""What holds a sandboxed program on the host, and the one that a back end's command line makes."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from dataclasses import dataclass
from typing import IO, Any, Final, Protocol

from .launch import READY, Launch, SandboxError
from .limits import children_of

SETUP_SECONDS: Final = 60.0
"""Until a sandbox is set up."""

_END_SECONDS: Final = 30.0
_SAID_SECONDS: Final = 0.05
_DETAIL: Final = 300  # letters


@dataclass(frozen=True)
class Ended:
    """How a sandbox ended: an exit code, below 0 that of a signal, and user and system time of all its processes."""

    code: int
    cpu_seconds: float


class SandboxHolder(Protocol):
    """What holds a sandbox that is set up. Nothing but the program reads and writes its streams, as far as known."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    pid: int  # of the host's process whose descendants are the sandbox's
    kills_for_memory: bool  # something else enforces the memory limit, by SIGKILL

    def ended(self, *, wait: bool = False) -> Ended | None:
        """How it ended, None while it runs; a SandboxError if nobody knows any more."""

    def kill(self) -> Ended | None:
        """Kill all its processes and wait until they are gone; nothing happens where that was done.

        Returns how it ended, None if nobody knows.
        """


class Command:
    """A sandbox that a back end's command line has set up.

    It dies with the thread that started it, so a thread that ends early must not start a server. Its standard input is
    a pipe, or a descriptor that is given. A SandboxError if it cannot be set up.
    """

    def __init__(self, launch: Launch, stdin: int = subprocess.PIPE):
        self._launch = launch
        self._ended: Ended | None = None
        self._first: list[int] = []
        self.kills_for_memory = launch.kills_for_memory
        try:
            self._process = subprocess.Popen(
                launch.command,
                stdin=stdin,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                env=dict(launch.environment),
                cwd=launch.folder,
                start_new_session=True,
            )
        except OSError as error:
            launch.clean()
            raise SandboxError(f"{launch.command[0]} cannot be started: {error}") from error
        self.pid = self._process.pid
        self.stdout, self.stderr = _pipe(self._process.stdout), _pipe(self._process.stderr)
        given = stdin != subprocess.PIPE
        self.stdin = os.fdopen(os.open(os.devnull, os.O_WRONLY), "wb", 0) if given else _pipe(self._process.stdin)
        try:
            self._await_ready()
        except BaseException:
            self.kill()
            for pipe in (self.stdin, self.stdout, self.stderr):
                pipe.close()
            raise
        # Of the first process of the PID namespace: when it is gone, the kernel has ended all others.
        self._first = [os.pidfd_open(child) for child in children_of(self.pid)] if hasattr(os, "pidfd_open") else []
        self.pid = launch.holder() or self.pid

    def ended(self, *, wait: bool = False) -> Ended | None:
        """How it ended, None while it runs; reaps it."""
        if self._process.returncode is None:
            pid, status, usage = os.wait4(self._process.pid, 0 if wait else os.WNOHANG)
            if pid == 0:
                return None
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._ended = Ended(self._process.returncode, usage.ru_utime + usage.ru_stime)
        return self._ended

    def kill(self) -> Ended | None:
        """Kill all its processes, wait until they are gone and reap; nothing happens where that was done."""
        for first in self._first:
            kill_first_process(first)
        # Its holder then ends by itself, having counted the CPU time of all.
        if not self._first or not self._ends_by_itself():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._first = []
        self._launch.stop()
        self.ended(wait=True)
        self._launch.clean()
        return self._ended

    def _await_ready(self) -> None:
        """Wait until the sandbox is set up; then the program's time begins."""
        text, until = b"", time.monotonic() + SETUP_SECONDS
        while len(text) < len(READY):
            if not wait_for(self.stdout.fileno(), until - time.monotonic()):
                raise SandboxError(f"the sandbox was not set up: not done after {SETUP_SECONDS:.0f} s")
            if not (more := os.read(self.stdout.fileno(), len(READY) - len(text))):
                break
            text += more
        if text != READY:
            said = " ".join((self.said() or text).decode(errors="replace").split())
            raise SandboxError(said[:_DETAIL] or f"{self._launch.command[0]} ended without a word")

    def said(self) -> bytes:
        """What it says on standard error now, as before an end that nobody expected."""
        said = b""
        while wait_for(self.stderr.fileno(), _SAID_SECONDS) and (more := os.read(self.stderr.fileno(), 1 << 16)):
            said += more
        return said

    def _ends_by_itself(self) -> bool:
        """Whether the process that holds the sandbox ends shortly."""
        if self._process.returncode is not None:
            return True
        holder = os.pidfd_open(self._process.pid)
        try:
            return wait_for(holder, 1.0)
        finally:
            os.close(holder)


def kill_first_process(pidfd: int) -> None:
    """Kill the first process of a PID namespace, wait until it and all others are gone, and close its descriptor."""
    with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    if not wait_for(pidfd, _END_SECONDS):
        raise SandboxError(f"a killed sandbox lives on after {_END_SECONDS:g} s; look for processes in state D")
    os.close(pidfd)


def wait_for(descriptor: int, seconds: float) -> bool:
    """Whether a descriptor can be read within `seconds`; that of a process can when it has ended."""
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        return bool(selector.select(max(seconds, 0.0)))


def _pipe(pipe: IO[Any] | None) -> IO[bytes]:
    assert pipe is not None  # each was asked for
    return pipe
