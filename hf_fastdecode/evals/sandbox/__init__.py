"""Isolation of untrusted programs: choosing a back end that is proved to isolate, and running programs in it."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from ...log import logger
from .backends import Bubblewrap, Container, Unshare
from .launch import (
    SCRATCH,
    Backend,
    LimitExceeded,
    Limits,
    SandboxError,
    Unconfined,
    processes_with,
    python_command,
    view_of,
)
from .process import Command, ForkedPython, ForkServer, SandboxedProcess

__all__ = ["BACKENDS", "Limits", "Sandbox", "SandboxError", "choose", "prove", "prove_forks", "python_command"]
__all__ += ["ForkServer", "ForkedPython", "LimitExceeded", "SandboxedProcess"]

_PROBE: Final = Path(__file__).with_name("probe.py")
_LIMITS: Final = Limits(scratch_bytes=1 << 20, file_bytes=4 << 20, processes=16, wall_seconds=30)
_FAILURES: Final = (SandboxError, LimitExceeded, OSError, ValueError)
_END_SECONDS: Final = 5.0


def prove(backend: Backend) -> str | None:
    """Run `probe` in a sandbox. Returns its escapes, or why it did not run; None where the sandbox isolates."""
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
    """As `prove`, in two processes of a fork server: the second one must not see traces of the first one."""
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
    job: dict[str, Any]  # input of the probe
    canary: subprocess.Popen[bytes]  # a process that has one of the probe's words as an argument
    mark: str  # an argument of the probe itself

    def refusal(self, start: Callable[[], SandboxedProcess]) -> str | None:
        before = len(processes_with(self.mark))
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
            if len(processes_with(self.mark)) <= before:
                return "its processes are not visible from here, so that their end cannot be proved"
            process.wait()
        until = time.monotonic() + _END_SECONDS
        while lives := len(processes_with(self.mark)) > before and time.monotonic() < until:
            time.sleep(0.01)  # what held the sandbox ends after it
        return "a process that it left lives on" if lives else None


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


@dataclass(frozen=True)
class Sandbox:
    """Runs programs in a back end; may be called from several threads."""

    backend: Backend
    may_fork: bool = True  # Python programs may run in forks of an interpreter, where these isolate too

    @property
    def forks(self) -> bool:
        """Whether `fork_server` may be used and isolates under this back end, which is proved once."""
        with _PROVING:
            return self.may_fork and _fork_refusal(self.backend) is None

    @property
    def name(self) -> str:
        return self.backend.name

    def popen(
        self, argv: Sequence[str], *, readable: Sequence[Path] = (), limits: Limits | None = None
    ) -> SandboxedProcess:
        """Start a program in a new sandbox, in an empty writable folder and with a cleared environment.

        The program is an absolute path or a name found in the system's folders. Beside `/usr` it may read the given
        absolute folders and files of the host, at the same paths. A SandboxError if the sandbox cannot be set up.
        """
        limits = limits or Limits()
        return SandboxedProcess(Command(self.backend.launch(argv, view_of(tuple(readable)), limits)), limits)

    def fork_server(self, python: ForkedPython) -> ForkServer:
        """An interpreter that forks a sandboxed process at a time; a SandboxError if it cannot be set up."""
        return ForkServer(self.backend, python)


_PROVING: Final = threading.Lock()

BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend
    for backend in (Bubblewrap(), Unshare(), Container("podman"), Container("docker"), Unconfined())
}
"""Sandboxes by name; `auto` tries them in this order, but never `none`."""

_SETTINGS: Final = Path("/proc/sys")
_DENIES_USER_NAMESPACES: Final = (
    ("kernel/apparmor_restrict_unprivileged_userns", "1"),  # the default of Ubuntu 24.04
    ("kernel/unprivileged_userns_clone", "0"),
    ("user/max_user_namespaces", "0"),
)
"""Settings of Linux, and the values that deny user namespaces to ordinary users."""


def choose(name: str = "auto", *, allow_unsafe: bool = False) -> Sandbox:
    """A sandbox that has been proved to isolate: a back end by name, or for ``auto`` the first that passes the proof.

    `allow_unsafe` permits ``none``, under which a program has all rights of this user. A SandboxError where no back
    end passes, the named one does not, or it is ``none`` and not permitted; a ValueError for another name.
    """
    if name == "none":
        if not allow_unsafe:
            raise SandboxError(
                '`sandbox="none"` runs generated programs with all your rights: add `allow_unsafe=True` to permit it'
            )
        return Sandbox(BACKENDS["none"])
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"`sandbox` must be auto, {', '.join(BACKENDS)}, got {name!r}")
    refusals = []
    candidates = [name] if name != "auto" else [known for known in BACKENDS if known != "none"]
    for candidate in candidates:
        refusal = _refusal(candidate)
        if refusal is None:
            return Sandbox(BACKENDS[candidate])
        refusals.append(f"{candidate}: {refusal}")
    raise SandboxError(f"no sandbox for generated programs ({'; '.join(refusals)}); {_remedy(candidates)}")


def _remedy(candidates: Sequence[str]) -> str:
    install = "install bubblewrap (apt install bubblewrap)"
    for name, denying in _DENIES_USER_NAMESPACES if {"bwrap", "unshare"} & set(candidates) else ():
        setting = _SETTINGS / name
        if setting.exists() and setting.read_text().strip() == denying:
            install = (
                f"this system denies the user namespaces that bwrap and unshare need ({name.replace('/', '.')} is "
                f"{denying}): change that with sysctl, or install docker or podman (apt install podman)"
            )
    return f"{install}, or inside a container start that with --privileged"


@cache
def _refusal(name: str) -> str | None:
    """Say why a back end cannot be used; None where it passes the proof, which is run once per process."""
    backend = BACKENDS[name]
    return backend.missing() or prove(backend)


@cache
def _fork_refusal(backend: Backend) -> str | None:
    """As `_refusal`, of a back end's fork server."""
    command, readable = python_command()
    if backend.launch_fork_server(command, view_of(readable)) is None:
        return "it has none"
    refusal = prove_forks(backend)
    if refusal is not None:
        logger.warning("%s starts a new interpreter for each program, since it cannot fork: %s", backend.name, refusal)
    return refusal
