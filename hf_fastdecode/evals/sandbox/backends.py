"""Back ends: namespaces, made by bubblewrap or by util-linux alone."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import stat
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from .launch import (
    NOBODY,
    SCRATCH,
    Backend,
    Launch,
    Limits,
    SandboxError,
    View,
    first_process,
    limited,
    tool,
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
