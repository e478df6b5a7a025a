"""Checks JavaScript programs: a new process for each, and one for the tests of all."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from ...records import Status
from ...sandbox import LimitExceeded, Limits, Sandbox, SandboxedProcess, SandboxError
from ...task import Task
from ..messages import BrokenMessageError, Peer, how_it_ended, judged, one_line

_FOLDER: Final = Path(__file__).resolve().parent
_HEAP_MIB: Final = 512
_JUDGE_SECONDS: Final = 60.0  # more than the program may take


def missing_node() -> str | None:
    """Why JavaScript cannot be checked here, with the remedy; None where it can."""
    return None if shutil.which("node") else "JavaScript programs need node; install it (apt install nodejs)"


class JavaScriptRunner:
    """Checks programs one after another. To be used by the thread that made it, as a context manager.

    Args:
        sandbox: Where programs and tests run, each in one of its own.
        limits: Of each program.

    Raises:
        SandboxError: There is no node.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits | None = None):
        if missing := missing_node():
            raise SandboxError(missing)
        self._sandbox = sandbox
        self._limits = limits or Limits()
        self._node = Path(shutil.which("node") or "").resolve()
        self._judge: Peer | None = None

    def check(self, task: Task, completion: str) -> tuple[Status, str]:
        """The outcome of a completion's tests, and a line about it.

        Args:
            task: In JavaScript.
            completion: What continues its stem.

        Raises:
            SandboxError: A process could not be started, or that of the tests broke down; this says nothing about
                the completion.
        """
        judge = self._running_judge()
        with self._start("candidate.js", self._limits) as process:
            candidate = Peer(process)
            if outcome := _loaded(candidate, task, completion):
                return outcome
            try:
                return judged(judge, candidate, "\n".join(task.tests), task.entry_point)
            except SandboxError:
                self.close()
                raise

    def close(self) -> None:
        """End the process of the tests; the next check starts another."""
        if self._judge is not None:
            self._judge.process.kill()
        self._judge = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _running_judge(self) -> Peer:
        seconds = self._limits.wall_seconds + _JUDGE_SECONDS
        if self._judge is None:
            self._judge = Peer(self._start("judge.js", replace(self._limits, cpu_seconds=1e6, wall_seconds=seconds)))
        self._judge.process.renew(seconds)
        return self._judge

    def _start(self, script: str, limits: Limits) -> SandboxedProcess:
        command = [str(self._node), f"--max-old-space-size={_HEAP_MIB}", str(_FOLDER / script)]
        return self._sandbox.popen(command, readable=[self._node, _FOLDER], limits=limits)


def _loaded(candidate: Peer, task: Task, completion: str) -> tuple[Status, str] | None:
    """Have the program defined; the outcome where it cannot be."""
    try:
        candidate.send(task.program(completion), task.entry_point)
        kind, *texts = candidate.receive()
    except LimitExceeded as error:
        return error.status, error.detail
    except BrokenMessageError as error:
        return "output", str(error)
    except (EOFError, BrokenPipeError):
        return how_it_ended(candidate.process)
    if kind == b"ready":
        return None
    return ("compile" if kind == b"compile" else "fail"), one_line(b" ".join(texts))
