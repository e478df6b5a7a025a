"""A program that runs in a sandbox: its holder on the host, talking to it within its limits, and its outcome."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import TracebackType
from typing import IO, Any, Final, Protocol, Self

from .launch import (
    READY,
    Exceeded,
    Launch,
    LimitExceeded,
    Limits,
    SandboxError,
    Usage,
    children_of,
    memory_is_exhausted,
    starved_seconds,
    usage_of,
)

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
    """The host's handle of a sandbox that is set up. As far as known, only the program uses its streams."""

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
        if self._process.returncode is None:
            pid, status, usage = os.wait4(self._process.pid, 0 if wait else os.WNOHANG)
            if pid == 0:
                return None
            self._process.returncode = os.waitstatus_to_exitcode(status)
            self._ended = Ended(self._process.returncode, usage.ru_utime + usage.ru_stime)
        return self._ended

    def kill(self) -> Ended | None:
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
        """Its standard error until now, for an unexpected end."""
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


_POLL: Final = 0.05  # seconds between two looks at what the processes use
_CHUNK: Final = 1 << 16
_STARVED: Final = 0.05  # share of its time: a program that sleeps waits for nobody's CPU time


class SandboxedProcess:
    """A running sandboxed program with its standard input and output, from when its sandbox is set up.

    Calls wait no longer than its limits allow: they raise `LimitExceeded` after killing it. As a context manager it is
    killed and reaped at the end.

    Attributes:
        limits: The program's limits.
        stderr: What has been read from its standard error; calls that wait read it.
        cpu_seconds: User and system time of all its processes, including the setup; 0 until its end.
        exit_code: 128 + the number of a signal; None until it has ended by itself.
    """

    def __init__(self, holder: SandboxHolder, limits: Limits):
        self.limits = limits
        self.stderr = bytearray()
        self.cpu_seconds = 0.0
        self.exit_code: int | None = None
        self._holder = holder
        self._last_usage = Usage()
        self._chunks: list[bytes] = []
        self._written = 0  # bytes of standard output
        self._started = self._renewed = self._waited = self._looked = time.monotonic()
        self._cpu_before = self._starved_before = 0.0  # when it was renewed
        self._deadline = self._started + limits.wall_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(holder.stdout, selectors.EVENT_READ, partial(self._read, self._keep_output))
        self._selector.register(holder.stderr, selectors.EVENT_READ, partial(self._read, self.stderr.extend))

    @property
    def pid(self) -> int:
        """The host's process whose descendants are the sandbox's."""
        return self._holder.pid

    @property
    def wall_seconds(self) -> float:
        """Time since the program started."""
        return time.monotonic() - self._started

    @property
    def used_its_cpu_seconds(self) -> bool:
        """Whether a process that has ended had met its limit on CPU time."""
        return self.cpu_seconds - self._cpu_before >= self.limits.cpu_seconds

    def renew(self, cpu_seconds: float, wall_seconds: float) -> None:
        """Give it so much time from now and its whole output limit again, as for a server's next request."""
        self.limits = replace(self.limits, cpu_seconds=cpu_seconds, wall_seconds=wall_seconds)
        self._renewed = self._waited = time.monotonic()
        self._deadline = self._renewed + wall_seconds
        self._cpu_before, self._starved_before = self.usage().cpu_seconds, starved_seconds(self.pid)
        self._written = 0
        self.stderr.clear()

    def usage(self) -> Usage:
        return usage_of(self.pid)

    def send(self, data: bytes) -> None:
        """Write to its standard input; a BrokenPipeError if it has closed that. Its output is kept for `receive`."""
        rest = memoryview(data)

        def write(pipe: IO[bytes]) -> None:
            nonlocal rest
            rest = rest[os.write(pipe.fileno(), rest[:_CHUNK]) :]

        self._selector.register(self._holder.stdin, selectors.EVENT_WRITE, write)
        try:
            self._pump(lambda: not rest)
        finally:
            with contextlib.suppress(KeyError, ValueError):  # a kill has closed it
                self._selector.unregister(self._holder.stdin)

    def close_input(self) -> None:
        with contextlib.suppress(OSError):
            self._holder.stdin.close()

    def receive(self) -> bytes:
        """The next bytes of its standard output; none once that is closed."""
        self._pump(lambda: bool(self._chunks) or self._holder.stdout.closed)
        data = b"".join(self._chunks)
        self._chunks.clear()
        return data

    def wait(self) -> int:
        """Wait until it ends by itself, and reap it: its exit code, or 128 + the number of a signal.

        Its standard input is closed and its output dropped.
        """
        self.close_input()
        while self.receive():
            pass
        pause = 0.001
        while (ended := self._holder.ended()) is None:
            self._check_limits()
            time.sleep(pause)  # its output is closed: it is about to end
            pause = min(2 * pause, _POLL)
        self.exit_code = ended.code if ended.code >= 0 else 128 - ended.code
        self.kill()
        if self._holder.kills_for_memory and self.exit_code == 128 + signal.SIGKILL:
            raise LimitExceeded(*self.limits.memory_exceeded())
        if self.exit_code == 128 + signal.SIGXCPU:  # the kernel looked before this busy host did
            raise LimitExceeded(*self.limits.cpu_exceeded())
        return self.exit_code

    def kill(self) -> None:
        """Kill all its processes, wait until they are gone, and reap; nothing happens where that was done."""
        ended = self._holder.kill()
        # Killed processes of a PID namespace are reaped without being counted.
        self.cpu_seconds = max(ended.cpu_seconds if ended else 0.0, self._last_usage.cpu_seconds)
        self._selector.close()
        self._read_last_errors()
        for pipe in (self._holder.stdin, self._holder.stdout, self._holder.stderr):
            with contextlib.suppress(OSError):
                pipe.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _pump(self, done: Callable[[], bool]) -> None:
        """Move bytes until something is done, within the limits."""
        # While its host was busy elsewhere, e.g. with the process that asks it, its time stood still.
        idle = time.monotonic() - self._waited
        self._deadline, self._renewed = self._deadline + idle, self._renewed + idle
        while not done():
            for key, _ in self._selector.select(_POLL):
                key.data(key.fileobj)
            self._check_limits()
        self._waited = time.monotonic()

    def _read(self, keep: Callable[[bytes], None], pipe: IO[bytes]) -> None:
        if data := os.read(pipe.fileno(), _CHUNK):
            keep(data)
        else:
            self._selector.unregister(pipe)
            pipe.close()

    def _keep_output(self, data: bytes) -> None:
        self._chunks.append(data)
        self._written += len(data)

    def _read_last_errors(self) -> None:
        """Read what is left of its standard error, such as why it ended."""
        with contextlib.suppress(ValueError, BlockingIOError):  # it is closed, or empty and in use by who got away
            os.set_blocking(self._holder.stderr.fileno(), False)
            self.stderr += os.read(self._holder.stderr.fileno(), _CHUNK)

    def _check_limits(self) -> None:
        if max(self._written, len(self.stderr)) > self.limits.output_bytes:
            self._exceeded("output", f"wrote more than {self.limits.output_bytes:,} bytes")
        now = time.monotonic()
        if now - self._looked < _POLL:
            return
        self._looked = now
        usage = self._last_usage = self.usage()
        if found := self.limits.exceeded_by(replace(usage, cpu_seconds=usage.cpu_seconds - self._cpu_before)):
            self._exceeded(*found)
        if memory_is_exhausted():
            self._exceeded("memory", "the machine ran out of memory", load=True)
        if now > self._deadline:
            seconds, cpu = now - self._renewed, usage.cpu_seconds - self._cpu_before
            starved = starved_seconds(self.pid) - self._starved_before > _STARVED * seconds
            self._exceeded("timeout", f"not done after {seconds:.0f} s, {cpu:.1f} s of CPU", load=starved)

    def _exceeded(self, status: Exceeded, detail: str, *, load: bool = False) -> None:
        self.kill()
        raise LimitExceeded(status, detail, load=load)
