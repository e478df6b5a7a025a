"""Sandboxes: running programs in a back end, and choosing one that is proved to isolate."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from ...log import logger
from .command import Command
from .containers import Container
from .fork_server import ForkedPython, ForkServer
from .launch import Backend, SandboxError, Unconfined, python_command, view_of
from .limits import Limits
from .namespaces import Bubblewrap, Unshare
from .process import SandboxedProcess
from .proof import prove, prove_forks


@dataclass(frozen=True)
class Sandbox:
    """Runs programs in a back end; may be called from several threads.

    Attributes:
        backend: Isolates them.
        may_fork: Whether Python programs may run in forks of an interpreter, where these isolate too.
    """

    backend: Backend
    may_fork: bool = True

    @property
    def forks(self) -> bool:
        """Whether `fork_server` can be used: it may be, and isolates under this back end, which is proved once."""
        if not self.may_fork:
            return False
        with _PROVING:
            return _fork_refusal(self.backend) is None

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
        return SandboxedProcess(Command(self.backend.launch(argv, view_of(tuple(readable)), limits)), limits)

    def fork_server(self, python: ForkedPython) -> ForkServer:
        """An interpreter that forks a sandboxed process at a time; a SandboxError if it cannot be set up."""
        return ForkServer(self.backend, python)


_PROVING: Final = threading.Lock()

BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend
    for backend in (Bubblewrap(), Unshare(), Container("podman"), Container("docker"), Unconfined())
}
"""By name; `auto` tries them in this order, but never `none`."""

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


@cache
def _fork_refusal(backend: Backend) -> str | None:
    """Why a back end's fork server cannot be used; None where it passes the proof, which is run once per process."""
    command, readable = python_command()
    if backend.launch_fork_server(command, view_of(readable)) is None:
        return "it has none"
    refusal = prove_forks(backend)
    if refusal is not None:
        logger.warning("%s starts a new interpreter for each program, since it cannot fork: %s", backend.name, refusal)
    return refusal
