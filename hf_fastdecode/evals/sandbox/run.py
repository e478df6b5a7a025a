"""Running programs in a sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from .launch import Backend, SandboxError
from .limits import LimitExceeded, Limits
from .process import SandboxedProcess
from .view import view_of


@dataclass(frozen=True)
class Outcome:
    """What became of a sandboxed program.

    Attributes:
        status: ``ok`` for exit code 0, ``failed`` for any other end of its own, the limit that it exceeded, or
            ``sandbox_error`` where no sandbox could be made.
        exit_code: 128 + the number of a signal; None where it was killed for a limit or never ran.
        stdout: What it wrote there.
        stderr: What it wrote there.
        detail: One line about the end; empty for ``ok``.
        cpu_seconds: User and system time of all its processes, with that of the setup.
        wall_seconds: From its start to its end.
    """

    status: Literal["ok", "failed", "timeout", "memory", "output", "sandbox_error"]
    exit_code: int | None = None
    stdout: bytes = b""
    stderr: bytes = b""
    detail: str = ""
    cpu_seconds: float = 0.0
    wall_seconds: float = 0.0


@dataclass(frozen=True)
class Sandbox:
    """Runs programs in a back end. Its calls may come from several threads.

    Attributes:
        backend: How programs are isolated.
    """

    backend: Backend

    @property
    def name(self) -> str:
        """Of the back end."""
        return self.backend.name

    def popen(
        self, argv: Sequence[str], *, readable: Sequence[Path] = (), limits: Limits | None = None
    ) -> SandboxedProcess:
        """Start a program in a new sandbox, in an empty writable folder and with a cleared environment.

        Args:
            argv: The program, as an absolute path or a name found in the system's folders, and its arguments.
            readable: Absolute folders and files of the host that it may read beside `/usr`, seen where they are.
            limits: Of the program; by default `Limits()`.

        Raises:
            SandboxError: The sandbox could not be set up.
            ValueError: A readable path is relative, does not exist, or would show the whole machine.
        """
        limits = limits or Limits()
        return SandboxedProcess(self.backend.launch(argv, view_of(tuple(readable)), limits), limits)

    def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", readable: Sequence[Path] = (), limits: Limits | None = None
    ) -> Outcome:
        """Run a program to its end; arguments as for `popen`.

        Args:
            argv: Program and arguments.
            stdin: What it reads from its standard input.
            readable: Paths of the host.
            limits: Of the program.
        """
        try:
            process = self.popen(argv, readable=readable, limits=limits)
        except SandboxError as error:
            return Outcome("sandbox_error", detail=str(error))
        output = b""
        with process:
            try:
                with contextlib.suppress(BrokenPipeError):
                    process.send(stdin)
                process.close_input()
                while data := process.receive():
                    output += data
                code = process.wait()
            except LimitExceeded as error:
                outcome = Outcome(error.status, None, output, detail=error.detail)
            else:
                outcome = Outcome("failed" if code else "ok", code, output, detail=_detail(code))
            seconds = process.wall_seconds
        return replace(outcome, stderr=bytes(process.stderr), cpu_seconds=process.cpu_seconds, wall_seconds=seconds)


def _detail(code: int) -> str:
    if code <= 128:
        return f"ended with exit code {code}" if code else ""
    return f"ended by signal {code - 128}"
