"""The interface of back ends: limits and file system of a sandboxed program, and the command line that starts it."""

from __future__ import annotations

import contextlib
import math
import os
import resource
import shutil
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Final, Literal

Exceeded = Literal["timeout", "memory", "output"]

# glibc maps memory for every thread's arena and stack without touching it; resident memory may exceed the data segment
# by the stacks and what is shared.
_RESIDENT_SLACK: Final = 64 << 20

_LEAST_AVAILABLE: Final = 0.03  # of the machine's memory


class LimitExceeded(Exception):  # noqa: N818 - an outcome of a program, not an error of the caller
    """A sandboxed program exceeded a limit and has been killed; `load`: other programs may be the cause."""

    def __init__(self, status: Exceeded, detail: str, *, load: bool = False):
        super().__init__(detail)
        self.status, self.detail, self.load = status, detail, load


@dataclass(frozen=True)
class Limits:
    """Bounds of one sandboxed program."""

    cpu_seconds: float = 10.0  # user and system time of all its processes
    wall_seconds: float = 60.0  # it is waited for so long; generous, because it depends on the load of the machine
    memory_bytes: int = 1 << 30  # data segment of each process (RLIMIT_DATA), resident memory of all together
    address_bytes: int | None = None  # of each process (RLIMIT_AS); None where more is reserved than used: the JVM
    file_bytes: int = 16 << 20  # of each file (RLIMIT_FSIZE)
    open_files: int = 64  # of each process (RLIMIT_NOFILE)
    processes: int = 64  # and threads, together (RLIMIT_NPROC)
    output_bytes: int = 16 << 20  # to standard output and standard error, each
    scratch_bytes: int = 64 << 20  # of its writable folder, a tmpfs

    def prlimit(self, *, processes: bool = True) -> list[str]:
        """Return the start of a command line that sets these limits; empty where `prlimit` is missing."""
        program = shutil.which("prlimit")
        if program is None:
            return []
        values = self.resources(processes=processes)
        return [program, *(f"--{name}={soft}:{hard}" for name, (soft, hard) in values.items())]

    def resources(self, *, processes: bool = True) -> dict[str, tuple[int, int]]:
        """Soft and hard limits of each process by the kernel's names, unless lower ones are in force here."""
        seconds = math.ceil(self.cpu_seconds)
        values = {
            "cpu": (seconds + 1, seconds + 2),  # after the host's accounting, which says why
            "data": (self.memory_bytes,) * 2,
            "fsize": (self.file_bytes,) * 2,
            "nofile": (self.open_files,) * 2,
            "core": (0, 0),
        }
        if processes:
            values["nproc"] = (self.processes,) * 2
        if self.address_bytes is not None:
            values["as"] = (self.address_bytes,) * 2
        return {name: (soft, hard) for name, (soft, hard) in values.items() if _lowers(name, hard)}

    def exceeded_by(self, usage: Usage) -> tuple[Exceeded, str] | None:
        """Return the limit that a use exceeds, and a line about it."""
        if usage.cpu_seconds > self.cpu_seconds:
            return self.cpu_exceeded()
        if usage.resident_bytes > self.memory_bytes + _RESIDENT_SLACK:
            return self.memory_exceeded()
        return None

    def cpu_exceeded(self) -> tuple[Exceeded, str]:
        return "timeout", f"used more than {self.cpu_seconds:g} s of CPU time"

    def memory_exceeded(self) -> tuple[Exceeded, str]:
        return "memory", f"used more than {self.memory_bytes >> 20:,} MiB of memory"


def _lowers(name: str, value: int) -> bool:
    """Whether a limit is below the one in force, which only root may raise."""
    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    return hard == resource.RLIM_INFINITY or value <= hard


@dataclass(frozen=True)
class Usage:
    """CPU time and memory of a sandbox's processes."""

    cpu_seconds: float = 0.0  # user and system time, also of processes that these waited for
    resident_bytes: int = 0  # anonymous and shared memory; pages that forked processes share count for each


def usage_of(pid: int) -> Usage:
    """Read the use of a process and its descendants from `/proc`; in a PID namespace no orphan leaves the tree."""
    cpu = resident = 0
    for one in _with_descendants(pid):
        try:
            fields = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            status = Path(f"/proc/{one}/status").read_text()
        except OSError:  # it has ended
            continue
        cpu += sum(int(field) for field in fields[11:15])  # utime, stime, cutime, cstime: proc(5)
        resident += sum(
            int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith(("RssAnon:", "RssShmem:"))
        )
    return Usage(cpu / os.sysconf("SC_CLK_TCK"), resident)


def starved_seconds(pid: int) -> float:
    """Return how long the threads of a process and its descendants have waited for a CPU that others used."""
    waited = 0
    for one in _with_descendants(pid):
        for schedstat in Path("/proc").glob(f"{one}/task/*/schedstat"):
            try:
                waited += int(schedstat.read_text().split()[1])  # ns: Documentation/scheduler/sched-stats
            except (OSError, IndexError):
                continue
    return waited / 1e9


def memory_is_exhausted() -> bool:
    """Whether the machine has next to no memory left.

    Limits of processes do not count unmapped shared memory, files without a name, and the file system's tables.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return False
    sizes = {name: int(size.split()[0]) for name, _, size in (line.partition(":") for line in lines)}
    return sizes.get("MemAvailable", 1) < _LEAST_AVAILABLE * sizes.get("MemTotal", 0)


def _with_descendants(pid: int) -> Iterator[int]:
    waiting = [pid]
    while waiting:
        one = waiting.pop()
        waiting += children_of(one)
        yield one


def children_of(pid: int) -> list[int]:
    """Return the child processes of all threads of a process; none where `/proc` does not list them."""
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for children in lists for child in children.split()]


def processes_with(argument: str) -> dict[int, list[bytes]]:
    """Return the processes of this machine that have an argument: their numbers, and their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if argument.encode() in words:
                found[int(folder.name)] = words
    return found


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
    readable: tuple[Path, ...]  # folders and files, at the paths that they have on the host
    links: tuple[tuple[Path, str], ...]  # symbolic links to folders among them: path and target
    hidden: tuple[Path, ...]  # folders below them that appear empty


@cache
def view_of(readable: tuple[Path, ...]) -> View:
    """Show the system's programs and libraries, and further absolute paths; symbolic links are followed.

    Python packages of the system are hidden: they may hold the tests that a program is judged by. A ValueError where a
    path is relative or does not exist, or is a folder that would show the whole machine.
    """
    for path in readable:
        if not path.is_absolute() or not path.exists():
            raise ValueError(f"readable paths must be absolute and exist, got {path}; use path.resolve()")
        if path in (Path("/"), Path("/proc"), Path("/home"), Path.home()):
            raise ValueError(f"{path} would show more than a program needs; name the folders that it reads instead")
    present = [Path(name) for name in (*_SYSTEM, *_SYSTEM_FILES) if os.path.lexists(name)]
    folders = [path for path in present if not path.is_symlink()]
    links = [(path, os.readlink(path)) for path in present if path.is_symlink()]
    shown = [*folders, *(path for path in readable if path not in folders)]
    hidden = list(dict.fromkeys(_packages(shown)))
    needed = [path for path in dict.fromkeys(shown) if not _seen_through_others(path, shown, hidden)]
    return View(readable=tuple(needed), links=tuple(links), hidden=tuple(hidden))


@cache
def python_command() -> tuple[tuple[str, ...], tuple[Path, ...]]:
    """Return the command line of this interpreter with the standard library alone, and the paths that it reads."""
    executable = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    library = Path(sysconfig.get_path("stdlib", vars={**base, "installed_base": sys.base_prefix})).parent
    return (str(executable), "-S", "-s", "-P"), (executable, library.resolve())


def _seen_through_others(path: Path, shown: Sequence[Path], hidden: Sequence[Path]) -> bool:
    above = [other for other in shown if other != path and path.is_relative_to(other)]
    covers = [folder for folder in hidden if path.is_relative_to(folder)]
    return any(not any(folder.is_relative_to(other) for folder in covers) for other in above)


def _packages(folders: Sequence[Path]) -> Iterator[Path]:
    for folder in folders:
        patterns = _PACKAGES if folder == Path("/usr") else ("python*/*-packages", "*-packages")
        for pattern in patterns:
            yield from (found for found in sorted(folder.glob(pattern)) if found.is_dir() and not found.is_symlink())


NOBODY: Final = 65534
"""User and group inside a sandbox."""

READY: Final = b"ready\n"
"""A sandbox writes it to standard output once it is set up, right before the program starts."""


class SandboxError(RuntimeError):
    """A sandbox could not be made; this says nothing about the program."""


@dataclass(frozen=True)
class Launch:
    command: list[str]
    environment: Mapping[str, str] = field(default_factory=lambda: ENVIRONMENT)  # complete
    folder: Path = Path("/")  # working directory on the host
    holder: Callable[[], int | None] = lambda: None  # whose descendants are the sandbox's; None: the command
    kills_for_memory: bool = False  # something else enforces the memory limit, by SIGKILL
    stop: Callable[[], object] = lambda: None  # ends what a killed command leaves, such as a container
    clean: Callable[[], None] = lambda: None  # removes what was made for it


class Backend(ABC):
    """A program or a method that isolates programs; hashable."""

    name: str  # as `choose` takes it

    def missing(self) -> str | None:
        """Say why it cannot be tried at all, with the remedy; None where it can be tried."""
        return None

    @abstractmethod
    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        """Return the command line that runs a program in a new sandbox."""

    def launch_fork_server(self, argv: Sequence[str], view: View) -> Launch | None:
        """As `launch`, for a trusted program that makes a sandbox for each process that it forks.

        It is the first process in its namespaces, keeps its rights over them, and writes `READY` itself. None where
        processes can have no such rights.
        """
        return None


def limited(argv: Sequence[str], limits: Limits, *, processes: bool = True) -> list[str]:
    """Return the last commands in every sandbox: set the limits, write `READY`, become the program.

    With `processes`, their number is limited too: outside a user namespace that counts all processes of the user.
    """
    return [*limits.prlimit(processes=processes), "/bin/sh", "-c", 'echo ready; exec "$@"', "sh", *argv]


def first_process(argv: Sequence[str], name: str = "sh") -> list[str]:
    """Return the first process of a PID namespace, which runs a command and so accounts for its CPU time.

    No signal from inside can end it, and its end ends all processes that the command has left. Others find it by
    `name`, which is one of its arguments.
    """
    return ["/bin/sh", "-c", '"$@"; exit $?', name, *argv]


def tool(name: str) -> str:
    """Find the absolute path of a program of the host, also of one for the system; else empty."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin") or ""


@dataclass(frozen=True)
class Unconfined(Backend):
    """No isolation: limits, a cleared environment and a temporary folder. For programs that are trusted."""

    name: str = "none"

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        folder = tempfile.TemporaryDirectory(prefix="hf-fastdecode-", ignore_cleanup_errors=True)
        return Launch(
            limited(argv, limits, processes=False),
            environment={**ENVIRONMENT, "HOME": folder.name, "TMPDIR": folder.name},
            folder=Path(folder.name),
            clean=folder.cleanup,
        )
