"""Sandboxes: running programs in a back end, choosing one, and proving that it isolates."""

from __future__ import annotations

import json
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

from .containers import Container
from .launch import SCRATCH, Backend, SandboxError, Unconfined, python_command, view_of
from .limits import LimitExceeded, Limits
from .namespaces import Bubblewrap, Unshare
from .process import SandboxedProcess


@dataclass(frozen=True)
class Sandbox:
    """Runs programs in a back end; may be called from several threads."""

    backend: Backend

    @property
    def name(self) -> str:
        """The back end's name."""
        return self.backend.name

    def popen(
        self, argv: Sequence[str], *, readable: Sequence[Path] = (), limits: Limits | None = None
    ) -> SandboxedProcess:
        """Start a program in a new sandbox, in an empty writable folder and with a cleared environment.

        The program is an absolute path or a name found in the system's folders. Beside `/usr` it may read the given
        absolute folders and files of the host, at the same paths. A SandboxError if the sandbox cannot be set up.
        """
        limits = limits or Limits()
        return SandboxedProcess(self.backend.launch(argv, view_of(tuple(readable)), limits), limits)


BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend
    for backend in (Bubblewrap(), Unshare(), Container("podman"), Container("docker"), Unconfined())
}
"""By name; `auto` tries them in this order, but never `none`."""

_PROBE: Final = Path(__file__).with_name("probe.py")
_PROOF_LIMITS: Final = Limits(scratch_bytes=1 << 20, file_bytes=4 << 20, processes=16, wall_seconds=30)


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
    """What makes a sandbox possible on this machine, where none of these back ends passes."""
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
    """Why a back end cannot be used; None where it passes the proof, which is run once per process."""
    backend = BACKENDS[name]
    return backend.missing() or prove(backend)


def prove(backend: Backend) -> str | None:
    """Run `probe` in a sandbox: no network, home, foreign files, processes or rights, and limits that bind.

    Returns what the probe could do, or why it did not run; None where the sandbox isolates.
    """
    token = f"hf-fastdecode-{secrets.token_hex(16)}"
    command, readable = python_command()
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
            "scratch_bytes": _PROOF_LIMITS.scratch_bytes,
            "processes": _PROOF_LIMITS.processes,
            "memory_bytes": _PROOF_LIMITS.memory_bytes,
        }
        try:
            escapes = _probe(backend, [*command, "-c", _PROBE.read_text(encoding="utf-8"), token], readable, job)
        except (SandboxError, LimitExceeded, OSError, ValueError) as error:
            return str(error)
        if canary.poll() is not None and not escapes:
            return "it kills processes of the host"
        assert canary.stdin is not None  # a pipe
        canary.stdin.close()  # which ends it
    return escapes


def _probe(backend: Backend, argv: list[str], readable: Sequence[Path], job: dict[str, Any]) -> str | None:
    # The token that the probe looks for is that of the canary; its own arguments hold another.
    mark = argv[-1] = f"{argv[-1]}-probe"
    with Sandbox(backend).popen(argv, readable=readable, limits=_PROOF_LIMITS) as process:
        process.send(json.dumps(job).encode() + b"\n")
        answer = b""
        while not answer.endswith(b"\n"):
            if not (data := process.receive()):
                said = process.stderr.decode(errors="replace").strip().splitlines()
                return f"the probe failed: {said[-1] if said else 'it wrote nothing'}"
            answer += data
        if escapes := json.loads(answer):
            return ", ".join(escapes)
        if not _running(mark):
            return "its processes cannot be seen from here, so that their end cannot be proved"
        process.wait()
        return "a process that it left behind lives on" if _running(mark) else None


def _running(token: str) -> bool:
    """Whether a process of this machine has this argument."""
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and token.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                return True
        except OSError:
            continue
    return False
