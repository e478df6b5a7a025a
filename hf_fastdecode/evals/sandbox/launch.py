"""How a back end starts a program: what the program sees of the file system, the interface of all back ends, and the
one without isolation.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Protocol

from .limits import Limits

SCRATCH: Final = Path("/tmp")
"""The one writable folder: working directory, home and temporary folder at once."""

ENVIRONMENT: Final = {
    "PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "HOME": str(SCRATCH),
    "TMPDIR": str(SCRATCH),
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # an order of a set that changed from run to run would change verdicts
}

# Programs and libraries, the same on every machine of one distribution: nothing of a user's.
_SYSTEM: Final = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/nix/store")
_SYSTEM_FILES: Final = ("/etc/alternatives", "/etc/ld.so.cache")
_PACKAGES: Final = ("lib*/python*/site-packages", "lib*/python*/dist-packages", "local/lib*/python*/*-packages")


@dataclass(frozen=True)
class View:
    """A read-only part of the host's file system."""

    readable: tuple[Path, ...]  # folders and files, at the paths that they have on the host
    links: tuple[tuple[Path, str], ...]  # symbolic links to folders among them: path and target
    hidden: tuple[Path, ...]  # folders below them that appear empty


@cache
def view_of(readable: tuple[Path, ...]) -> View:
    """The system's programs and libraries, and further absolute paths; symbolic links are followed.

    Python packages of the system are hidden: they may hold the tests that a program is judged by.

    Raises:
        ValueError: A path is relative or does not exist, or is a folder that would show the whole machine.
    """
    for path in readable:
        _check_readable(path)
    present = [Path(name) for name in (*_SYSTEM, *_SYSTEM_FILES) if os.path.lexists(name)]
    folders = [path for path in present if not path.is_symlink()]
    links = [(path, os.readlink(path)) for path in present if path.is_symlink()]
    shown = [*folders, *(path for path in readable if path not in folders)]
    hidden = list(dict.fromkeys(_packages(shown)))
    needed = [path for path in dict.fromkeys(shown) if not _seen_through_others(path, shown, hidden)]
    return View(readable=tuple(needed), links=tuple(links), hidden=tuple(hidden))


@cache
def python_command() -> tuple[tuple[str, ...], tuple[Path, ...]]:
    """An interpreter like this one without its environment: its command line, and the paths that it reads.

    Only the standard library can be imported: neither site-packages nor the program's folder is on the path, and the
    user's variables do not reach it.
    """
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    library = Path(sysconfig.get_path("stdlib", vars={**base, "installed_base": sys.base_prefix})).parent
    return (str(executable), "-S", "-s", "-P"), (executable, library.resolve())


def _check_readable(path: Path) -> None:
    if not path.is_absolute() or not path.exists():
        raise ValueError(f"readable paths must be absolute and exist, got {path}; use path.resolve()")
    if path in (Path("/"), Path("/proc"), Path("/home"), Path.home()):
        raise ValueError(f"{path} would show more than a program needs; name the folders that it reads instead")


def _seen_through_others(path: Path, shown: Sequence[Path], hidden: Sequence[Path]) -> bool:
    """Whether a path lies in another one that is shown, and in none that is hidden there."""
    above = [other for other in shown if other != path and path.is_relative_to(other)]
    covers = [folder for folder in hidden if path.is_relative_to(folder)]
    return any(not any(folder.is_relative_to(other) for folder in covers) for other in above)


def _packages(folders: Sequence[Path]) -> Iterator[Path]:
    """Folders of installed Python packages."""
    for folder in folders:
        patterns = _PACKAGES if folder == Path("/usr") else ("python*/*-packages", "*-packages")
        for pattern in patterns:
            yield from (found for found in sorted(folder.glob(pattern)) if found.is_dir() and not found.is_symlink())


NOBODY: Final = 65534
"""User and group inside a sandbox."""

READY: Final = b"ready\n"
"""What a sandbox writes to standard output once it is set up, right before the program starts."""


class SandboxError(RuntimeError):
    """A sandbox could not be made; this says nothing about the program."""


@dataclass(frozen=True)
class Launch:
    """A command line that sets a sandbox up and runs a program in it."""

    command: list[str]
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)  # complete
    folder: Path = Path("/")  # working directory on the host
    holder: Callable[[], int | None] = lambda: None  # whose descendants are the sandbox's; None: the command
    kills_for_memory: bool = False  # something else enforces the memory limit, by SIGKILL
    stop: Callable[[], None] = lambda: None  # ends what a killed command leaves, such as a container
    clean: Callable[[], None] = lambda: None  # removes what was made for it


class Backend(Protocol):
    """A way to isolate a program."""

    def __hash__(self) -> int: ...

    @property
    def name(self) -> str:
        """As `choose` takes it."""

    def missing(self) -> str | None:
        """Why it cannot be tried at all, with the remedy; None where it can be tried."""

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        """The command line that runs a program in a new sandbox."""

    def launch_fork_server(self, argv: Sequence[str], view: View) -> Launch | None:
        """As `launch`, for a program that is trusted and makes a sandbox of its own for each process that it forks: it
        is the first process in its namespaces, keeps its rights over them, and writes `READY` itself. None where
        processes can have no such rights.
        """


def limited(argv: Sequence[str], limits: Limits, *, processes: bool = True) -> list[str]:
    """The last commands in every sandbox: set the limits, write `READY`, become the program.

    With `processes`, their number is limited too: outside a user namespace that counts all processes of the user.
    """
    return [*limits.prlimit(processes=processes), "/bin/sh", "-c", 'echo ready; exec "$@"', "sh", *argv]


def first_process(argv: Sequence[str], name: str = "sh") -> list[str]:
    """The first process of a PID namespace: it runs a command, waits for it and so accounts for its CPU time.

    No signal from inside can end it, and its end ends all processes that the command has left. Others find it by
    `name`, which is one of its arguments.
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

    def launch_fork_server(self, argv: Sequence[str], view: View) -> Launch | None:
        """None: there is nothing to keep programs from the server."""
        return None
