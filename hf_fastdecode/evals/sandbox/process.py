"""A program that runs in a sandbox: talking to it within its limits, ending it, and its outcome."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import IO, Final, Self

from .command import SandboxHolder
from .limits import Exceeded, LimitExceeded, Limits, Usage, memory_is_exhausted, starved_seconds, usage_of

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
        self._selector.register(holder.stdout, selectors.EVENT_READ, self._read_stdout)
        self._selector.register(holder.stderr, selectors.EVENT_READ, self._read_stderr)

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
        """What all its processes use now."""
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
        """Close its standard input."""
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

    def _read_stdout(self, pipe: IO[bytes]) -> None:
        if data := os.read(pipe.fileno(), _CHUNK):
            self._chunks.append(data)
            self._written += len(data)
        else:
            self._selector.unregister(pipe)
            pipe.close()

    def _read_stderr(self, pipe: IO[bytes]) -> None:
        if data := os.read(pipe.fileno(), _CHUNK):
            self.stderr += data
        else:
            self._selector.unregister(pipe)
            pipe.close()

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
