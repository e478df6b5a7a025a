"""The proof that a sandbox isolates: `probe` runs inside and finds no way out."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .command import Command
from .fork_server import ForkedPython, ForkServer
from .launch import SCRATCH, Backend, SandboxError, python_command, view_of
from .limits import LimitExceeded, Limits
from .process import SandboxedProcess

_PROBE: Final = Path(__file__).with_name("probe.py")
_LIMITS: Final = Limits(scratch_bytes=1 << 20, file_bytes=4 << 20, processes=16, wall_seconds=30)
_FAILURES: Final = (SandboxError, LimitExceeded, OSError, ValueError)
_END_SECONDS: Final = 5.0


def prove(backend: Backend) -> str | None:
    """Run `probe` in a sandbox: no network, home, foreign files, processes or rights, and limits that bind.

    Returns what the probe could do, or why it did not run; None where the sandbox isolates.
    """
    command, readable = python_command()
    with _host() as host:
        try:
            launch = backend.launch(
                [*command, "-c", _PROBE.read_text(encoding="utf-8"), host.mark], view_of(readable), _LIMITS
            )
            return host.refusal(lambda: SandboxedProcess(Command(launch), _LIMITS))
        except _FAILURES as error:
            return str(error)


def prove_forks(backend: Backend) -> str | None:
    """As `prove`, in two processes of a fork server: the second one must not see what the first one left."""
    code = compile(_PROBE.read_text(encoding="utf-8"), "probe.py", "exec", dont_inherit=True)
    python = ForkedPython((), (("probe", code),), 'sys.modules["probe"].main()')
    with _host() as host:
        try:
            with ForkServer(backend, python, host.mark) as server:
                return host.refusal(lambda: server.fork(_LIMITS)) or host.refusal(lambda: server.fork(_LIMITS))
        except _FAILURES as error:
            return str(error)


@dataclass(frozen=True)
class _Host:
    """What a probe could reach.

    Attributes:
        job: What it tries.
        canary: A process, which has one of the probe's words as an argument.
        mark: An argument of the probe itself.
    """

    job: dict[str, Any]
    canary: subprocess.Popen[bytes]
    mark: str

    def refusal(self, start: Callable[[], SandboxedProcess]) -> str | None:
        """What a probe could do that is started so; None for nothing."""
        before = _running(self.mark)
        with start() as process:
            with contextlib.suppress(BrokenPipeError):  # it says why in place of an answer
                process.send(json.dumps(self.job).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                if not (data := process.receive()):
                    process.kill()
                    said = process.stderr.decode(errors="replace").strip().splitlines()
                    return f"the probe failed: {said[-1] if said else 'it wrote nothing'}"
                answer += data
            if escapes := json.loads(answer):
                return ", ".join(escapes)
            if self.canary.poll() is not None:
                return "it kills processes of the host"
            if _running(self.mark) <= before:
                return "its processes cannot be seen from here, so that their end cannot be proved"
            process.wait()
        until = time.monotonic() + _END_SECONDS
        while lives := _running(self.mark) > before and time.monotonic() < until:
            time.sleep(0.01)  # what held the sandbox ends after it
        return "a process that it left behind lives on" if lives else None


@contextlib.contextmanager
def _host() -> Iterator[_Host]:
    token = f"hf-fastdecode-{secrets.token_hex(16)}"
    _, readable = python_command()
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        tempfile.NamedTemporaryFile() as file,
        subprocess.Popen(["/bin/sh", "-c", "read line", token], stdin=subprocess.PIPE) as canary,
    ):
        home = Path.home()
        job = {
            "port": server.getsockname()[1],
            "home": str(home),
            "shown_of_home": [path.relative_to(home).parts[0] for path in readable if path.is_relative_to(home)],
            "file": file.name,
            "pid": canary.pid,
            "token": token,
            "scratch": str(SCRATCH),
            "scratch_bytes": _LIMITS.scratch_bytes,
            "processes": _LIMITS.processes,
            "memory_bytes": _LIMITS.memory_bytes,
        }
        try:
            yield _Host(job, canary, f"{token}-probe")
        finally:
            assert canary.stdin is not None  # a pipe
            with contextlib.suppress(BrokenPipeError):
                canary.stdin.close()  # which ends it


def _running(token: str) -> int:
    """The number of processes of this machine that have this argument."""
    found = 0
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            found += folder.name.isdigit() and token.encode() in (folder / "cmdline").read_bytes().split(b"\0")
    return found
