"""What a sandboxed program may use, and what it has used so far."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

Exceeded = Literal["timeout", "memory", "output"]

# glibc maps memory for every thread's arena and stack without touching it; resident memory may exceed the data segment
# by the stacks and what is shared.
_RESIDENT_SLACK: Final = 64 << 20

_LEAST_AVAILABLE: Final = 0.03  # of the machine's memory


class LimitExceeded(Exception):  # noqa: N818 - an outcome of a program, not an error of the caller
    """A sandboxed program exceeded a limit and has been killed.

    `load` says whether other programs may be the cause: it waited for a CPU, or the machine has no memory left.
    """

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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}; leave it out for the default")

    def prlimit(self, *, processes: bool = True) -> list[str]:
        """The `prlimit` command that sets these limits for the command behind it; empty where `prlimit` is missing."""
        program = shutil.which("prlimit")
        if program is None:
            return []
        values = self.resources(processes=processes)
        return [program, *(f"--{name}={soft}:{hard}" for name, (soft, hard) in values.items())]

    def resources(self, *, processes: bool = True) -> dict[str, tuple[int, int]]:
        """Soft and hard limits of each process, by the kernel's names in small letters; `processes` with their number.

        Those in force here that are lower already are left out.
        """
        seconds = math.ceil(self.cpu_seconds)
        values = {
            "cpu": (seconds + 1, seconds + 2),  # behind the host's own accounting, which tells why
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
        """The limit that a use exceeds, and a line about it."""
        if usage.cpu_seconds > self.cpu_seconds:
            return self.cpu_exceeded()
        if usage.resident_bytes > self.memory_bytes + _RESIDENT_SLACK:
            return self.memory_exceeded()
        return None

    def cpu_exceeded(self) -> tuple[Exceeded, str]:
        """The limit on CPU time, and a line about it."""
        return "timeout", f"used more than {self.cpu_seconds:g} s of CPU time"

    def memory_exceeded(self) -> tuple[Exceeded, str]:
        """The limit on memory, and a line about it."""
        return "memory", f"used more than {self.memory_bytes >> 20:,} MiB of memory"


def _lowers(name: str, value: int) -> bool:
    """Whether a limit is below the one in force already, which only root may raise."""
    import resource  # absent on Windows, where `prlimit` is as well

    hard = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))[1]
    return hard == resource.RLIM_INFINITY or value <= hard


@dataclass(frozen=True)
class Usage:
    """What a sandbox's processes use: user and system time of those that run and of those that they waited for, and
    anonymous and shared memory, where pages that forked processes share count for each.
    """

    cpu_seconds: float = 0.0
    resident_bytes: int = 0


def usage_of(pid: int) -> Usage:
    """The use of a process and of all its descendants, from `/proc`.

    Inside a PID namespace an orphan becomes a child of its first process, so that none leaves the tree.
    """
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
    """How long the threads of a process and its descendants have waited for a CPU that others used."""
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

    Limits of processes do not count what is in files without a name (`memfd_create`), in shared memory that nobody has
    mapped, or in the file system's tables.
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
    """The child processes of all threads of a process; none where `/proc` does not list them."""
    try:
        lists = [(task / "children").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return []
    return [int(child) for children in lists for child in children.split()]
