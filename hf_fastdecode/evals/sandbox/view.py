"""What a sandboxed program sees of the file system."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

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
    """A read-only part of the host's file system.

    Attributes:
        readable: Folders and files, seen where they are.
        links: Symbolic links to folders among them: path and target.
        hidden: Folders below them, seen empty.
    """

    readable: tuple[Path, ...]
    links: tuple[tuple[Path, str], ...]
    hidden: tuple[Path, ...]


@cache
def view_of(readable: tuple[Path, ...]) -> View:
    """The system's programs and libraries, and further paths.

    Python packages of the system are hidden: they may hold the tests that a program is judged by.

    Args:
        readable: Absolute folders and files, seen where they are; symbolic links are followed.

    Raises:
        ValueError: A path is relative or does not exist, or is a folder that would uncover the whole machine.
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

    Only the standard library can be imported: neither site-packages nor the folder of the program is on the path, and
    variables of the user do not reach it.
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
