"""Isolation by util-linux alone, the same as bubblewrap's: new namespaces, a root put together by mounts, `nobody`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from .drop_root import mount_point, sources, without_root
from .launch import NOBODY, Launch, limited, tool
from .limits import Limits
from .view import SCRATCH, View

_PROGRAMS: Final = ("unshare", "mount", "umount", "pivot_root", "setpriv")
_UNSHARE_NAMESPACES: Final = ["--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--cgroup", "--pid"]
_DEVICES: Final = ("null", "zero", "random", "urandom")
_FILES: Final = 4096  # of the writable folder: files without content take memory as well


@dataclass(frozen=True)
class Unshare:
    """The programs `unshare` and `mount`."""

    name: str = "unshare"

    def missing(self) -> str | None:
        """Whether util-linux is installed."""
        absent = [name for name in _PROGRAMS if not tool(name)]
        return f"{', '.join(absent)} not installed (apt install util-linux)" if absent else None

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        """Run as `nobody` in new namespaces."""
        paths = sources(view.readable)
        script = "\n".join(["set -eu", *_mounts(view, limits, paths), *_closing()])
        # The shell stays as the first process of the PID namespace: no signal from inside can end it, and it reaps.
        command = [tool("setpriv"), "--pdeathsig", "KILL", tool("unshare"), *_UNSHARE_NAMESPACES, "--fork", "--kill-child"]
        command += ["--", "/bin/sh", "-c", script, "sh", *limited(argv, limits)]
        return Launch(without_root(command, paths))


def _mounts(view: View, limits: Limits, paths: dict[Path, Path]) -> Iterator[str]:
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
    yield f"mount -t tmpfs -o size={limits.scratch_bytes},nr_inodes={_FILES},mode=1777 tmpfs {root}{SCRATCH}"
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


def _closing() -> Iterator[str]:
    """Shell commands that give the rights away and run the program."""
    yield f"cd {SCRATCH}"
    # Of the one user namespace allowed, the next command makes use; the program cannot make another.
    yield "echo 1 > /proc/sys/user/max_user_namespaces"
    # It keeps its rights over its own namespace for as long as it takes to give them all away.
    become = f"unshare --user --map-user={NOBODY} --map-group={NOBODY} --keep-caps --"
    drop = "setpriv --ambient-caps=-all --inh-caps=-all --bounding-set=-all --no-new-privs --"
    yield f'{become} {drop} "$@" && exit 0 || exit $?'


def _mount_points(path: Path) -> list[Path]:
    """A path and the mounts below it: making a mount read-only leaves those inside as they are."""
    points = {path}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        point = Path(line.split()[4].encode().decode("unicode_escape"))
        if point.is_relative_to(path):
            points.add(point)
    return sorted(points)


def _locked(path: Path) -> str:
    """Options of a mount that a user namespace may not take away."""
    flags = os.statvfs(path).f_flag
    names = ("nosuid", "nodev", "noexec", "noatime", "relatime")
    return "".join(f",{name}" for name in names if flags & getattr(os, f"ST_{name.upper()}"))
