"""Back ends: limits and file system of a sandboxed program, and the command line that starts it.

Namespaces are made by bubblewrap or by util-linux alone.
"""

from __future__ import annotations

import contextlib
import math
import os
import shlex
import shutil
import stat
import sys
import sysconfig
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value is not None and not value > 0:
                raise ValueError(f"{name} must be above 0, got {value}; leave it out for the default")

    def prlimit(self, *, processes: bool = True) -> list[str]:
        """Return the start of a command line that sets these limits; empty where `prlimit` is missing."""
        program = shutil.which("prlimit")
        if program is None:
            return []
        values = self.resources(processes=processes)
        return [program, *(f"--{name}={soft}:{hard}" for name, (soft, hard) in values.items())]

    def resources(self, *, processes: bool = True) -> dict[str, tuple[int, int]]:
        """Return soft and hard limits of each process by the kernel's names, unless lower ones are in force here.

        With `processes`, their number is limited too.
        """
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
    import resource  # absent on Windows, where `prlimit` is as well

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

    Limits of processes do not count files without a name (`memfd_create`), unmapped shared memory, and the file
    system's tables.
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


def processes_with(argument: str) -> int:
    """Return how many processes of this machine have an argument."""
    found = 0
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found += argument.encode() in command.read_bytes().split(b"\0")
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


def first_process(argv: Sequence[str]) -> list[str]:
    """Return the first process of a PID namespace, which runs a command and so accounts for its CPU time.

    No signal from inside can end it, and its end ends all processes that the command has left.
    """
    return ["/bin/sh", "-c", '"$@"; exit $?', "sh", *argv]


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


_SERVER_BYTES: Final = 1 << 16  # of the folder of a fork server, which writes nothing
_BWRAP: Final = [f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts", "cgroup")]


@dataclass(frozen=True)
class Bubblewrap(Backend):
    name: str = "bwrap"

    def missing(self) -> str | None:
        return None if shutil.which("bwrap") else "not installed (apt install bubblewrap)"

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        # Unless it can make user namespaces, the program cannot mount a tmpfs that has no size.
        rights = ["--disable-userns", "--uid", str(NOBODY), "--gid", str(NOBODY), "--cap-drop", "ALL"]
        return _bubblewrap(rights, view, limits.scratch_bytes, first_process(limited(argv, limits)))

    def launch_fork_server(self, argv: Sequence[str], view: View) -> Launch:
        return _bubblewrap(["--uid", "0", "--gid", "0", "--cap-add", "ALL"], view, _SERVER_BYTES, argv)


def _bubblewrap(rights: Sequence[str], view: View, scratch_bytes: int, argv: Sequence[str]) -> Launch:
    paths = sources(view.readable)
    command = [tool("bwrap"), *_BWRAP, *rights, "--die-with-parent", "--as-pid-1", "--hostname", "sandbox"]
    command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
    command += ["--perms", "1777", "--size", str(scratch_bytes), "--tmpfs", str(SCRATCH)]
    for path in sorted([*view.hidden, *paths]):  # a folder before what lies in it
        for parent in reversed(path.parents[:-1]):
            command += ["--perms", "0755", "--dir", str(parent)]  # else only its user could read them
        if path in paths:
            command += ["--ro-bind", str(paths[path]), str(path)]
        else:
            command += ["--size", "4096", "--tmpfs", str(path)]
    for path, target in view.links:
        command += ["--symlink", target, str(path)]
    for path in view.hidden:
        command += ["--remount-ro", str(path)]
    command += ["--remount-ro", "/", "--chdir", str(SCRATCH), "--", *argv]
    return Launch(without_root(command, paths))


_PROGRAMS: Final = ("unshare", "mount", "umount", "pivot_root", "setpriv")
_UNSHARE: Final = ["--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--cgroup", "--pid"]
_DEVICES: Final = ("null", "zero", "random", "urandom")
_FILES: Final = 4096  # of the writable folder: files without content take memory as well


@dataclass(frozen=True)
class Unshare(Backend):
    name: str = "unshare"

    def missing(self) -> str | None:
        absent = [name for name in _PROGRAMS if not tool(name)]
        return f"{', '.join(absent)} not installed (apt install util-linux)" if absent else None

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        # It keeps its rights over its own namespace for as long as it takes to give them all away.
        become = f"unshare --user --map-user={NOBODY} --map-group={NOBODY} --keep-caps --"
        drop = "setpriv --ambient-caps=-all --inh-caps=-all --bounding-set=-all --no-new-privs --"
        closing = [
            f"cd {SCRATCH}",
            # Of the one user namespace allowed, the next command makes use; the program cannot make another.
            "echo 1 > /proc/sys/user/max_user_namespaces",
            # The shell stays as first process of the PID namespace: no signal from inside can end it, and it reaps.
            f'{become} {drop} "$@" && exit 0 || exit $?',
        ]
        return _unshare(closing, view, limits.scratch_bytes, limited(argv, limits))

    def launch_fork_server(self, argv: Sequence[str], view: View) -> Launch:
        return _unshare([f'cd {SCRATCH} && exec "$@"'], view, _SERVER_BYTES, argv)


def _unshare(closing: Iterable[str], view: View, scratch_bytes: int, argv: Sequence[str]) -> Launch:
    """Put a root together in new namespaces, then run the shell commands `closing` with a command line."""
    paths = sources(view.readable)
    script = "\n".join(["set -eu", *_mounts(view, scratch_bytes, paths), *closing])
    command = [tool("setpriv"), "--pdeathsig", "KILL", tool("unshare"), *_UNSHARE, "--fork", "--kill-child"]
    return Launch(without_root([*command, "--", "/bin/sh", "-c", script, "sh", *argv], paths))


def _mounts(view: View, scratch_bytes: int, paths: dict[Path, Path]) -> Iterator[str]:
    """Shell commands that put the root together. Each program that they call takes 2 ms, so they call few."""
    root = mount_point("root")
    folders = [SCRATCH, *(path for path in paths if path.is_dir())]
    above = {path.parent for path in paths} | {path.parent for path, _ in view.links}
    yield f"mount -t tmpfs -o size=1m,nr_inodes={_FILES},mode=755 tmpfs {root}"
    yield f"mkdir -p {_quoted(root, Path('/old'), Path('/proc'), Path('/dev'), *above, *folders)}"
    yield f"mount -t proc -o nosuid,nodev,noexec proc {root}/proc"
    for name in _DEVICES:
        yield f": > {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}"
    yield f"cp -P /dev/fd /dev/stdin /dev/stdout /dev/stderr {root}/dev"
    yield f"mount -t tmpfs -o size={scratch_bytes},nr_inodes={_FILES},mode=1777 tmpfs {root}{SCRATCH}"
    for path in sorted([*view.hidden, *paths]):  # a folder before what lies in it
        inside = _quoted(root, path)
        if path not in paths:
            yield f"mount -t tmpfs -o size=4k,mode=755 tmpfs {inside}"
            continue
        if any(path.is_relative_to(covering) for covering in (SCRATCH, *view.hidden)):
            yield f"mkdir -p {_quoted(root, path if path.is_dir() else path.parent)}"  # the first ones are covered
        if not path.is_dir():
            yield f": > {inside}"
        first, *others = _mount_points(path)
        yield f"mount -o rbind,ro{_locked(first)} {shlex.quote(str(paths[path]))} {inside}"
        yield from (f"mount -o remount,bind,ro{_locked(one)} {_quoted(root, one)}" for one in others)
    yield from (f"mount -o remount,bind,ro {_quoted(root, path)}" for path in view.hidden)
    yield from (f"ln -s {shlex.quote(target)} {_quoted(root, path)}" for path, target in view.links)
    yield f"cd {root} && pivot_root . old && umount -l /old && mount -o remount,bind,ro tmpfs /"


def _quoted(root: Path, *paths: Path) -> str:
    return " ".join(shlex.quote(f"{root}{path}") for path in paths)


def _mount_points(path: Path) -> list[Path]:
    """Return a path and the mounts below it, which stay writable when it is made read-only."""
    points = {path}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].encode().decode("unicode_escape"))
        if point.is_relative_to(path):
            points.add(point)
    return sorted(points)


def _locked(path: Path) -> str:
    flags = os.statvfs(path).f_flag
    names = ("nosuid", "nodev", "noexec", "noatime", "relatime")
    return "".join(f",{name}" for name in names if flags & getattr(os, f"ST_{name.upper()}"))


def sources(readable: Sequence[Path]) -> dict[Path, Path]:
    """Return where each path is found: in its place, or in the folder that `without_root` fills."""
    if os.geteuid() != 0:
        return {path: path for path in readable}
    return {
        path: path if _open_to_all(path) else mount_point("paths") / str(number)
        for number, path in enumerate(readable)
    }


def without_root(command: Sequence[str], paths: dict[Path, Path]) -> list[str]:
    """Run the command that makes the sandbox as `nobody` where this user is root; `paths` are from `sources`."""
    if os.geteuid() != 0:
        return list(command)
    user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    rights = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    dropped = [tool("setpriv"), *user, *rights, "--", *command]
    staged = {path: target for path, target in paths.items() if target != path}
    if not staged:
        return dropped
    lines = [f"mount -t tmpfs -o size=1m,mode=755 tmpfs {mount_point('paths')}"]
    for path, target in staged.items():
        lines.append(f"mkdir {target}" if path.is_dir() else f": > {target}")
        lines.append(f"mount --rbind {shlex.quote(str(path))} {target}")
    script = " && ".join([*lines, 'exec "$@"'])
    return [tool("unshare"), "--mount", "--propagation", "private", "--", "/bin/sh", "-c", script, "sh", *dropped]


@cache
def mount_point(purpose: str) -> Path:
    """Make an empty folder on which to mount in private namespaces. It stays: killed processes could not remove it.

    A SandboxError if another user has taken its name.
    """
    folder = Path(f"/tmp/hf-fastdecode-{os.geteuid()}")
    for path in (folder, folder / purpose):
        with contextlib.suppress(FileExistsError):
            path.mkdir()
        found = path.lstat()
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            raise SandboxError(f"{path} is no folder of user {os.geteuid()}; remove it")
        path.chmod(0o755)
    return folder / purpose


def _open_to_all(path: Path) -> bool:
    entered = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
    return entered and path.stat().st_mode & wanted == wanted
