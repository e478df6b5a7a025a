"""Programs that run in sandboxes: held on the host, spoken to within their limits, and forked by a server.

A fork server is an interpreter that has imported what programs need, in a sandbox. For each process it
makes new namespaces, a writable folder and limits, as a back end does for a command line. Only limits and descriptors
pass through it; programs come over the streams that the host opens for each. The server's side is `fork_loop`.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import selectors
import signal
import socket
import subprocess
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import IO, Any, Final, Self

from .launch import (
    READY,
    Backend,
    Exceeded,
    Launch,
    LimitExceeded,
    Limits,
    SandboxError,
    Usage,
    children_of,
    memory_is_exhausted,
    python_command,
    starved_seconds,
    usage_of,
    view_of,
)

SETUP_SECONDS: Final = 60.0
"""Until a sandbox is set up."""

_END_SECONDS: Final = 30.0
_SAID_SECONDS: Final = 0.05
_DETAIL: Final = 300  # letters


@dataclass(frozen=True)
class Ended:
    """The end of a sandbox: an exit code, below 0 that of a signal, and user and system time of all its processes."""

    code: int
    cpu_seconds: float


class Holder(ABC):
    """The host's handle of a sandbox that is set up. As far as known, only the program uses its streams."""

    stdin: IO[bytes]
    stdout: IO[bytes]
    stderr: IO[bytes]
    pid: int  # of the host's process whose descendants are the sandbox's
    kills_for_memory = False  # something else enforces the memory limit, by SIGKILL

    @abstractmethod
    def ended(self, *, wait: bool = False) -> Ended | None:
        """The end, None while it runs; a SandboxError if nobody knows any more."""

    @abstractmethod
    def kill(self) -> Ended | None:
        """Kill all its processes, if there are any, and wait until they are gone; its end, None if nobody knows."""

    def close(self) -> None:
        for pipe in (self.stdin, self.stdout, self.stderr):
            with contextlib.suppress(OSError):
                pipe.close()


class Command(Holder):
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
            self.close()
            raise
        # Of the first process of the PID namespace: when it is gone, the kernel has ended all others.
        for child in children_of(self.pid) if hasattr(os, "pidfd_open") else ():
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self._first.append(os.pidfd_open(child))
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
        said = b""
        while wait_for(self.stderr.fileno(), _SAID_SECONDS) and (more := os.read(self.stderr.fileno(), 1 << 16)):
            said += more
        return said

    def _ends_by_itself(self) -> bool:
        if self._process.returncode is not None:
            return True
        holder = os.pidfd_open(self._process.pid)
        try:
            return wait_for(holder, 1.0)
        finally:
            os.close(holder)


def kill_first_process(pidfd: int) -> None:
    """Kill the first process of a PID namespace, wait until all are gone, and close its descriptor."""
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
    """

    def __init__(self, holder: Holder, limits: Limits):
        self.limits = limits
        self.stderr = bytearray()  # as far as read, by calls that wait
        self.cpu_seconds = 0.0  # user and system time of all its processes, with the setup; 0 until its end
        self.exit_code: int | None = None  # 128 + the number of a signal; None until it has ended by itself
        self._holder = holder
        self._last_usage = Usage()
        self._chunks: list[bytes] = []
        self._written = 0  # bytes of standard output
        self._renewed = self._waited = self._looked = time.monotonic()
        self._cpu_before = self._starved_before = 0.0  # when it was renewed
        self._deadline = self._renewed + limits.wall_seconds
        self._selector = selectors.DefaultSelector()
        self._selector.register(holder.stdout, selectors.EVENT_READ, partial(self._read, self._chunks.append))
        self._selector.register(holder.stderr, selectors.EVENT_READ, partial(self._read, self.stderr.extend))

    @property
    def pid(self) -> int:
        return self._holder.pid

    @property
    def used_its_cpu_seconds(self) -> bool:
        """Whether a process that has ended had met its limit on CPU time."""
        return self.cpu_seconds - self._cpu_before >= self.limits.cpu_seconds

    def renew(self, cpu_seconds: float, wall_seconds: float) -> None:
        """Reset the time limit and the output limit, as for a server's next request."""
        self.limits = replace(self.limits, cpu_seconds=cpu_seconds, wall_seconds=wall_seconds)
        self._renewed = self._waited = time.monotonic()
        self._deadline = self._renewed + wall_seconds
        self._cpu_before, self._starved_before = usage_of(self.pid).cpu_seconds, starved_seconds(self.pid)
        self._written = 0
        self.stderr.clear()

    def send(self, data: bytes) -> None:
        """Write to its standard input; a BrokenPipeError if it has closed that. Its output is kept for `receive`."""
        unsent = memoryview(data)

        def write(pipe: IO[bytes]) -> None:
            nonlocal unsent
            unsent = unsent[os.write(pipe.fileno(), unsent[:_CHUNK]) :]

        self._selector.register(self._holder.stdin, selectors.EVENT_WRITE, write)
        try:
            self._pump(lambda: not unsent)
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
        """Wait until it ends by itself, without input and output: its exit code, or 128 + the number of a signal."""
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
        # Such as why it ended. It may be closed, or empty and in use by a process that got away.
        with contextlib.suppress(ValueError, BlockingIOError):
            os.set_blocking(self._holder.stderr.fileno(), False)
            self.stderr += os.read(self._holder.stderr.fileno(), _CHUNK)
        self._holder.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.kill()

    def _pump(self, done: Callable[[], bool]) -> None:
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
            self._written += len(data) if pipe is self._holder.stdout else 0
        else:
            self._selector.unregister(pipe)
            pipe.close()

    def _check_limits(self) -> None:
        if max(self._written, len(self.stderr)) > self.limits.output_bytes:
            self._exceeded("output", f"wrote more than {self.limits.output_bytes:,} bytes")
        now = time.monotonic()
        if now - self._looked < _POLL:
            return
        self._looked = now
        usage = self._last_usage = usage_of(self.pid)
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


_LOOP: Final = Path(__file__).with_name("fork_loop.py")
_LONGEST_REPORT: Final = 4096


@dataclass(frozen=True)
class ForkedPython:
    imports: tuple[str, ...]  # modules of the standard library
    modules: tuple[tuple[str, CodeType], ...]  # names and code of further ones, run once, before any process is forked
    program: str  # Python statements that each process runs then, in one line


class ForkServer:
    """An interpreter in a sandbox that forks sandboxed processes, one at a time; used in the thread that made it."""

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
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            prepared.await_ready()
            if prepared.limits != limits or wait_for(prepared.first, 0):  # it has ended
                prepared.kill()
                prepared.close()
                return None
        return prepared

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()


class _Fork(Holder):
    def __init__(self, control: socket.socket, limits: Limits):
        self.limits = limits
        self.pid = self.first = -1
        self._end: Ended | None = None
        request = json.dumps({"scratch_bytes": limits.scratch_bytes, "resources": limits.resources()})
        (stdin, to_stdin), (from_stdout, stdout), (from_stderr, stderr) = (os.pipe() for _ in range(3))
        self.stdin = os.fdopen(to_stdin, "wb", 0)
        self.stdout, self.stderr = os.fdopen(from_stdout, "rb", 0), os.fdopen(from_stderr, "rb", 0)
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
        try:
            said, descriptors, _, _ = socket.recv_fds(self._report, _LONGEST_REPORT, 1)
            if said != b"ready" or not descriptors:
                raise SandboxError(said.decode(errors="replace") or "its sandbox was not set up")
            (self.first,) = descriptors
            os.set_inheritable(self.first, False)
            lines = Path(f"/proc/self/fdinfo/{self.first}").read_text().splitlines()
            # -1 where it has ended.
            self.pid = next(int(line.partition(":")[2]) for line in lines if line.startswith("Pid:"))
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        super().close()
        self._report.close()

    def ended(self, *, wait: bool = False) -> Ended | None:
        if self._report.fileno() >= 0 and wait_for(self._report.fileno(), SETUP_SECONDS if wait else 0):
            with self._report, contextlib.suppress(ValueError):  # no numbers, but an error or nothing
                self._end = Ended(*json.loads(self._report.recv(_LONGEST_REPORT)))
        if self._report.fileno() < 0 and self._end is None:
            raise SandboxError("what held the sandbox ended before it")
        return self._end

    def kill(self) -> Ended | None:
        if self.first >= 0:
            first, self.first = self.first, -1
            kill_first_process(first)
        self._report.close()  # a report on a killed one counts no CPU time
        return self._end


def _close(command: Command, control: socket.socket) -> None:
    control.close()
    command.kill()
    command.close()
