"""How a back end starts a program: the interface of all, the part that they share, and the one without isolation."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from .limits import Limits
from .view import ENVIRONMENT, View

NOBODY: Final = 65534
"""User and group inside a sandbox."""

READY: Final = b"ready\n"
"""What a sandbox writes to standard output once it is set up, right before the program starts."""


class SandboxError(RuntimeError):
    """A sandbox could not be made or had; it says nothing about the program."""


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class Launch:
    """A command line that sets a sandbox up and runs a program in it.

    Attributes:
        command: Of the host.
        environment: Complete.
        folder: Working directory on the host's side.
        holder: The process of the host whose descendants are those of the sandbox; None for that of the command.
        kills_for_memory: Whether something else enforces the memory limit, by SIGKILL.
        stop: Ends what killing the command would leave, such as a container.
        clean: Removes what was made for it.
    """

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)
    folder: Path = Path("/")
    holder: Callable[[], int | None] = lambda: None
    kills_for_memory: bool = False
    stop: Callable[[], None] = _nothing
    clean: Callable[[], None] = _nothing


class Backend(Protocol):
    """A way to isolate a program."""

    @property
    def name(self) -> str:
        """As `choose` takes it."""

    def missing(self) -> str | None:
        """Why it cannot be tried at all, with the remedy; None where it can be tried."""

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        """The command line that runs a program in a new sandbox."""


def limited(argv: Sequence[str], limits: Limits, *, processes: bool = True) -> list[str]:
    """The last commands in every sandbox: put the limits on, write `READY`, become the program.

    Args:
        argv: The program.
        limits: Of it.
        processes: Limit their number, outside a user namespace that of all processes of the user.
    """
    return [*limits.prlimit(processes=processes), "/bin/sh", "-c", 'echo ready; exec "$@"', "sh", *argv]


def first_process(argv: Sequence[str], name: str = "sh") -> list[str]:
    """The first process of a PID namespace: it runs a command, waits for it and so accounts for its CPU time.

    No signal from inside can end it, and with it end all processes that the command has left.

    Args:
        argv: The command.
        name: An argument by which others can find it.
    """
    return ["/bin/sh", "-c", '"$@"; exit $?', name, *argv]


def tool(name: str) -> str:
    """The absolute path of a program of the host, or nothing; system programs are found without being on the path."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


@dataclass(frozen=True)
class Unconfined:
    """No isolation: limits, a cleared environment and a temporary folder. For programs that are trusted."""

    name: str = "none"

    def missing(self) -> str | None:
        """Never."""
        return None

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        """Run with the rights of this user; the view does not apply."""
        folder = tempfile.TemporaryDirectory(prefix="hf-fastdecode-", ignore_cleanup_errors=True)
        return Launch(
            limited(argv, limits, processes=False),
            environment={**ENVIRONMENT, "HOME": folder.name, "TMPDIR": folder.name},
            folder=Path(folder.name),
            clean=folder.cleanup,
        )
