"""Runners that check completions of a language in two processes, for program and tests.

Where tests call the program's function, the arguments go through here to the program and its result comes back, both
as plain data. So nothing that a program does to its process can reach a verdict: all it can do is answer calls.
A pass is a nonce that the process of the tests receives with them and repeats after the last one.

Messages are lists of byte strings over standard input and output.
"""

from __future__ import annotations

import secrets
import shutil
import struct
import subprocess
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import ClassVar, Final, Literal, Self

from ..records import Status, Task
from ..sandbox import LimitExceeded, Limits, Sandbox, SandboxedProcess, SandboxError


@dataclass(frozen=True)
class Result:
    """The outcome of a completion's tests; status, detail and outputs as in `Verdict`."""

    status: Status
    detail: str = ""
    load: bool = False  # a busy machine may have caused it: it is tried once more, alone and with more time
    status_if_at_fault: Status | None = None  # of a sandbox_error, if the program can be the cause
    outputs: str = field(default="", compare=False)  # results are equal by their outcome

    @classmethod
    def exceeded(cls, error: LimitExceeded) -> Result:
        return cls(error.status, error.detail, error.load)


class BrokenServerError(SandboxError):
    """The tests' process ended or met a limit. If the program is the cause, its result is `result`."""

    def __init__(self, result: Result):
        super().__init__(f"the tests' process broke down: {result.detail}")
        self.result = result


@dataclass(frozen=True)
class LanguageSupport:
    """The runner, limits and checks of a language."""

    runner: type[Runner]
    limits: Limits  # by default
    missing: Callable[[], str | None] = lambda: None  # why programs cannot be checked here, with the remedy
    check_task: Callable[[Task], object] = lambda task: None  # a ValueError if its tests cannot run
    version: Callable[[], str] = lambda: ""  # of what runs programs; empty where that is missing

    def limits_of(self, cpu_seconds: float | None = None, wall_seconds: float | None = None) -> Limits:
        """Replace the times that are given; by default the wall-clock limit is at least three times the CPU time."""
        default = self.limits
        cpu = cpu_seconds or default.cpu_seconds
        wall = wall_seconds or max(default.wall_seconds, 3 * cpu)
        return replace(default, cpu_seconds=cpu, wall_seconds=wall)


def require_tests(task: Task) -> None:
    """Refuse a task without tests, or with empty ones only, with a ValueError."""
    if not any(test.strip() for test in task.tests):
        raise ValueError(f"task {task.task_id} has no tests; every program would pass")


@cache
def command_version(command: str) -> str:
    """Return the first line of a command's ``--version``; empty where it is missing or prints nothing."""
    path = shutil.which(command)
    if path is None:
        return ""
    try:
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return next(iter(done.stdout.splitlines()), "").strip()


_STATUSES: Final[dict[bytes, Status]] = {b"compile": "compile", b"memory": "memory"}
_NO_LIMIT: Final = 1e6  # seconds of CPU time that a process which is renewed may use in all

Role = Literal["server", "candidate"]


class Runner(ABC):
    """Checks completions one after another, in the thread that made it; its end ends the processes that it keeps.

    There is one process for the tests, called the server, and one for each program, the candidate. Each says
    ``started`` before it is given anything, so that one that does not start is recognised. Both run in separate
    sandboxes, within the program's limits, which hold for each of the server's tests too.
    """

    _keeps_server: ClassVar[bool] = True  # from one check to the next
    _longest: ClassVar[int] = 4 << 20  # bytes of a message; typical results take a few KiB

    def __init__(self, sandbox: Sandbox, limits: Limits):
        self._sandbox, self._limits = sandbox, limits
        self._server: Peer | None = None
        self._server_is_new = True

    def check(self, task: Task, completion: str) -> Result:
        """Run a completion and the task's tests.

        Raises:
            SandboxError: Something broke that says nothing about the completion; it is tried again.
            BrokenServerError: The completion may have caused it.
            ValueError: The task has no tests, or none that can be run.
        """
        try:
            return self._check(task, completion)
        except SandboxError:
            self.close()
            raise
        finally:
            self._server_is_new = False
            if not self._keeps_server:
                self.close()

    @abstractmethod
    def _check(self, task: Task, completion: str) -> Result:
        """Check a completion by `_tested`."""

    @abstractmethod
    def _launch(self, role: Role) -> tuple[list[str], list[Path]]:
        """Give the command of a process, and the paths that it reads."""

    def close(self) -> None:
        """End the process of the tests; the next check starts another."""
        server, self._server = self._server, None
        if server is not None:
            server.process.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _running_server(self, cpu_seconds: float, wall_seconds: float) -> Peer:
        """Give the tests' process so much time for its next request; start one if need be."""
        if self._server is None:
            self._server = self._start("server", replace(self._limits, cpu_seconds=_NO_LIMIT))
            self._server_is_new = True
        self._server.process.renew(cpu_seconds, wall_seconds)
        return self._server

    def _start(self, role: Role, limits: Limits) -> Peer:
        process = self._open(role, limits)
        peer = Peer(process, self._longest)
        try:
            if (said := peer.receive()) != [b"started"]:
                raise EOFError(one_line(b" ".join(said)))
        except (EOFError, LimitExceeded) as error:
            process.kill()
            name = self._launch(role)[0][0]
            raise SandboxError(f"{name} does not start: {one_line(bytes(process.stderr)) or error}") from error
        except BaseException:
            process.kill()
            raise
        return peer

    def _open(self, role: Role, limits: Limits) -> SandboxedProcess:
        command, readable = self._launch(role)
        return self._sandbox.popen(command, readable=readable, limits=limits)

    def _tested(self, program: Sequence[bytes | str], tests: Sequence[bytes | str]) -> Result:
        """Load a program in a new process and run tests on it; both are messages, the tests without their nonce.

        The candidate answers ``ready``, or ``compile``, ``memory`` or ``error`` and a text.
        """
        candidate = self._start("candidate", self._limits)
        with candidate.process:
            answer = _asked(candidate, "before the tests", *program)
            if isinstance(answer, Result):
                return answer
            if (kind := answer[0]) != b"ready":
                return Result(_STATUSES.get(kind, "fail"), one_line(b" ".join(answer[1:])))
            return self._judged(candidate, tests)

    def _judged(self, candidate: Peer, tests: Sequence[bytes | str]) -> Result:
        """Run tests: the server sends ``call`` and a request, any number of times, and in the end a verdict.

        The verdict is ``pass`` with a text and the nonce, ``fail``, ``unjudged`` or ``memory`` and a text, or
        ``broken`` for tests that cannot be run. A fourth part may be a hash of what the program returned.
        """
        try:
            server = self._running_server(self._limits.cpu_seconds, self._limits.wall_seconds)
        except SandboxError as error:  # the program is running already, and may have taken the machine's memory
            raise BrokenServerError(Result("fail", str(error), load=True)) from error
        nonce = secrets.token_hex(16).encode()
        gone: Result | None = None
        try:
            server.send(*tests, nonce)
            while (message := server.receive())[:1] == [b"call"]:
                reply: list[bytes] = [b"error", b"the program is gone"]
                if gone is None:
                    answer = _asked(candidate, "during the tests", message[1])
                    if isinstance(answer, Result):
                        gone = answer
                    elif answer[0] == b"memory":
                        gone = Result("memory", one_line(answer[-1]))
                    elif len(answer) == 2:
                        reply = [b"value" if answer[0] == b"value" else b"error", answer[1]]
                server.send(*reply)
        except (EOFError, BrokenPipeError, LimitExceeded) as error:
            if gone is None:
                return self._server_failed(server, error, "the tests")
            self.close()
        if gone is not None:
            return gone
        kind, detail, said, outputs = [*message, b"", b"", b"", b""][:4]
        match kind:
            case b"fail":
                return Result("fail", one_line(detail), outputs=outputs.decode())
            case b"unjudged":
                return Result("unjudged", one_line(detail))
            case b"memory":
                return self._attributed(Result("memory", one_line(detail)))
            case b"pass" if secrets.compare_digest(said, nonce):
                return Result("pass", outputs=outputs.decode())
            case b"pass":
                raise SandboxError("the tests' process gave a wrong nonce")
        raise SandboxError(f"the tests cannot be run: {one_line(detail)}")

    def _server_failed(self, server: Peer, error: EOFError | OSError | LimitExceeded, what: str) -> Result:
        if not isinstance(error, LimitExceeded):
            return self._attributed(_ended(server.process, f"{what} ended"))
        return self._attributed(Result(error.status, f"{what} {error.detail}", error.load))

    def _attributed(self, result: Result) -> Result:
        """Return the result if only the program can be the cause, else raise it in a BrokenServerError.

        A new server has nothing but the program's values or its source; otherwise the machine or an earlier program
        may be the cause.
        """
        certain = self._server_is_new and not result.load and result.status != "fail"
        self.close()
        if certain:
            return result
        raise BrokenServerError(result)


def _asked(candidate: Peer, when: str, *request: bytes | str) -> list[bytes] | Result:
    """Return a candidate's answer, at least one part; or the result where it gives none."""
    try:
        candidate.send(*request)
        return candidate.receive() or [b"error", b"the program wrote over its answer"]
    except LimitExceeded as error:
        return Result.exceeded(error)
    except (EOFError, BrokenPipeError):
        return _ended(candidate.process, f"ended {when}")


def _ended(process: SandboxedProcess, detail: str) -> Result:
    try:
        code = process.wait()
    except LimitExceeded as error:
        return Result.exceeded(error)
    said = process.stderr.decode(errors="replace")
    if code > 128 and process.used_its_cpu_seconds:
        return Result(*process.limits.cpu_exceeded())
    if "out of memory" in said or "insufficient memory" in said:  # as node and the JVM say before they abort
        return Result("memory", one_line(said))
    # Nobody here has killed it: it may have been the system, short of memory.
    return Result("fail", f"{detail} with exit code {code}", load=code == 128 + 9)


_MOST_PARTS: Final = 1 << 20


class Peer:
    """A sandboxed process whose standard streams carry messages alone, of at most `longest` bytes from it."""

    def __init__(self, process: SandboxedProcess, longest: int):
        self.process = process
        self._longest = longest
        self._received = bytearray()

    def send(self, *parts: bytes | str) -> None:
        """Send a message; a BrokenPipeError if the process has ended."""
        encoded = [part.encode(errors="replace") if isinstance(part, str) else part for part in parts]
        sized = (struct.pack(">I", len(one)) + one for one in encoded)
        self.process.send(struct.pack(">I", len(encoded)) + b"".join(sized))

    def receive(self) -> list[bytes]:
        """The next message; an EOFError if the process closed its output, as by ending."""
        parts: list[bytes] = []
        length = 0
        for _ in range(self._read_number(_MOST_PARTS)):
            parts.append(self._read(self._read_number(self._longest - length)))
            length += len(parts[-1]) + 4
        return parts

    def _read_number(self, largest: int) -> int:
        (number,) = struct.unpack(">I", self._read(4))
        if number > largest:
            raise LimitExceeded("output", f"gave a result of more than {self._longest:,} bytes")
        return int(number)

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            if not (data := self.process.receive()):
                raise EOFError("it ended")
            self._received += data
        data = bytes(self._received[:size])
        del self._received[:size]
        return data


def one_line(text: bytes | str) -> str:
    """Shorten the output of a foreign process to a line of at most 300 letters."""
    said = text if isinstance(text, str) else text.decode(errors="replace")
    return " ".join(said.split())[:300]
