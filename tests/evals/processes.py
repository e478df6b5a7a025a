"""Processes of this machine, and programs that run to their end in a sandbox."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from hf_fastdecode.evals.sandbox import LimitExceeded, Limits, Sandbox, SandboxError


def running(token: str) -> bool:
    """Whether a process has this argument."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False


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


def run_to_end(
    sandbox: Sandbox,
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    readable: Sequence[Path] = (),
    limits: Limits | None = None,
) -> Outcome:
    """Run a program to its end; arguments as for `Sandbox.popen`."""
    try:
        process = sandbox.popen(argv, readable=readable, limits=limits)
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
