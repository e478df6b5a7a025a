"""Checking programs in two processes: one for each program, and one for the tests of all.

Where tests call the program's function, the arguments go through here to the program and its result comes back, both
as plain data. So nothing that a program does to its own process can reach a verdict: all it can do is to answer calls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ..records import Status
from ..sandbox import LimitExceeded, Limits, Sandbox, SandboxedProcess, SandboxError
from ..task import Task
from .messages import Peer, one_line
from .runner import Result

_STATUSES: Final[dict[bytes, Status]] = {b"compile": "compile", b"memory": "memory"}
_SERVER_SECONDS: Final = 60.0  # wall-clock time beyond that of a program


class PairRunner(ABC):
    """A runner that keeps the process of the tests from one check to the next.

    Args:
        sandbox: Where both processes run, each in a sandbox of its own.
        limits: Of each program.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits):
        self._sandbox, self._limits = sandbox, limits
        self._server: Peer | None = None

    @abstractmethod
    def check(self, task: Task, completion: str) -> Result:
        """Run a completion and the task's tests.

        Raises:
            SandboxError: A process could not be started, or that of the tests broke down; this says nothing about the
                completion.
            ValueError: The task has no tests, or none that can be run.
        """

    @abstractmethod
    def _launch(self, role: str) -> tuple[list[str], list[Path]]:
        """The command of ``server`` or ``candidate``, and the paths that it reads."""

    def close(self) -> None:
        """End the process of the tests; the next check starts another."""
        if self._server is not None:
            self._server.process.kill()
        self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running_server(self, seconds: float = 0.0) -> Peer:
        """The process of the tests, with at least so many seconds for its next answer."""
        seconds = max(seconds, self._limits.wall_seconds + _SERVER_SECONDS)
        if self._server is None:
            self._server = Peer(self._start("server", replace(self._limits, cpu_seconds=1e6, wall_seconds=seconds)))
        self._server.process.renew(1e6, seconds)
        return self._server

    def _start(self, role: str, limits: Limits) -> SandboxedProcess:
        command, readable = self._launch(role)
        return self._sandbox.popen(command, readable=readable, limits=limits)

    def _tested(self, program: Sequence[bytes | str], tests: Sequence[bytes | str]) -> Result:
        """Load a program in a new process and run tests on it.

        Args:
            program: The first message to the candidate, which answers ``ready``, or ``compile``, ``memory`` or
                ``error`` and a text.
            tests: The message to the server.
        """
        server = self._running_server()
        with self._start("candidate", self._limits) as process:
            candidate = Peer(process)
            answer = _asked(candidate, *program)
            if isinstance(answer, Result):
                return answer
            if (kind := answer[0]) != b"ready":
                return Result(_STATUSES.get(kind, "fail"), one_line(b" ".join(answer[1:])))
            try:
                return _judged(server, candidate, *tests)
            except SandboxError:
                self.close()
                raise


def _judged(server: Peer, candidate: Peer, *tests: bytes | str) -> Result:
    """Run tests: the server sends ``call`` and arguments, any number of times, and in the end ``pass`` or ``fail``."""
    gone: Result | None = None
    try:
        server.send(*tests)
        while (message := server.receive())[0] == b"call":
            reply: list[bytes] = [b"error", b"the program is gone"]
            if gone is None:
                answer = _asked(candidate, message[1])
                if isinstance(answer, Result):
                    gone = answer
                elif answer[0] == b"memory":
                    gone = Result("memory", one_line(answer[-1]))
                elif len(answer) == 2:
                    reply = [b"value" if answer[0] == b"value" else b"error", answer[1]]
            server.send(*reply)
    except (EOFError, BrokenPipeError, LimitExceeded) as error:
        raise SandboxError(f"the tests' process broke down: {one_line(str(error))}") from error
    if message[0] not in (b"pass", b"fail"):
        raise SandboxError(f"the tests cannot be run: {one_line(message[-1])}")
    return gone or (Result("pass") if message[0] == b"pass" else Result("fail", one_line(message[1])))


def _asked(candidate: Peer, *request: bytes | str) -> list[bytes] | Result:
    """What a candidate answers, at least one part; or the result where it does not."""
    try:
        candidate.send(*request)
        return candidate.receive() or [b"error", b"the program wrote over its answer"]
    except LimitExceeded as error:
        return Result.exceeded(error)
    except (EOFError, BrokenPipeError):
        return _ended(candidate.process)


def _ended(process: SandboxedProcess) -> Result:
    """The result of a program that left its process."""
    try:
        code = process.wait()
    except LimitExceeded as error:
        return Result.exceeded(error)
    said = process.stderr.decode(errors="replace")
    if code > 128 and process.cpu_seconds >= process.limits.cpu_seconds:
        return Result("timeout", f"used more than {process.limits.cpu_seconds:g} s of CPU time")
    if "out of memory" in said:  # as node and the JVM say before they abort
        return Result("memory", one_line(said))
    # Nobody here has killed it: it may have been the system, short of memory.
    return Result("fail", f"ended during the tests with exit code {code}", load=code == 128 + 9)
