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
_NAMESPACES: Final = ["--user", "--map-root-user", "--mount", "--net", "--ipc", "--uts", "--cgroup", "--pid"]
_DEVICES: Final = ("null", "zero", "full", "random", "urandom")
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
        command = [tool("setpriv"), "--pdeathsig", "KILL", tool("unshare"), *_NAMESPACES, "--fork", "--kill-child"]
        command += ["--", "/bin/sh", "-c", script, "sh", *limited(argv, limits)]
        return Launch(without_root(command, paths))


def _mounts(view: View, limits: Limits, paths: dict[Path, Path]) -> Iterator[str]:
    """Shell commands that put the root together."""
    root = mount_point("root")
    yield f"mount -t tmpfs -o size=1m,nr_inodes={_FILES},mode=755 tmpfs {root}"
    yield f"mkdir {root}/old {root}/proc {root}/dev {root}{SCRATCH}"
    yield f"mount -t proc -o nosuid,nodev,noexec proc {root}/proc"
    for name in _DEVICES:
        yield f": > {root}/dev/{name} && mount --bind /dev/{name} {root}/dev/{name}"
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        yield f"ln -s /proc/self/fd{target} {root}/dev/{name}"
    yield f"mount -t tmpfs -o {_scratch(limits)} tmpfs {root}{SCRATCH}"
    for path in sorted([*view.hidden, *paths]):  # a folder before what lies in it
        inside = shlex.quote(f"{root}{path}")
        if path not in paths:
            yield f"mount -t tmpfs -o size=4k,mode=755 tmpfs {inside}"
            continue
        yield (
            f"mkdir -p {inside}"
            if path.is_dir()
            else f"mkdir -p {shlex.quote(f'{root}{path.parent}')} && : > {inside}"
        )
        yield f"mount --rbind {shlex.quote(str(paths[path]))} {inside}"
        for place in _mount_points(path):
            kept = ",".join(["remount", "bind", "ro", *_locked(place)])
            yield f"mount -o {kept} {shlex.quote(f'{root}{place}')}"
    for path in view.hidden:
        yield f"mount -o remount,bind,ro {shlex.quote(f'{root}{path}')}"
    for path, target in view.links:
        yield f"ln -s {shlex.quote(target)} {shlex.quote(f'{root}{path}')}"
    yield f"cd {root} && pivot_root . old && umount -l /old && rmdir /old && mount -o remount,bind,ro tmpfs /"


def _scratch(limits: Limits) -> str:
    return f"size={limits.scratch_bytes},nr_inodes={_FILES},mode=1777,nosuid,nodev"


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


def _locked(path: Path) -> list[str]:
    """Options of a mount that a user namespace may not take away."""
    flags = os.statvfs(path).f_flag
    return [name for name in ("nosuid", "nodev", "noexec", "noatime", "relatime") if flags & _flag(name)]


def _flag(name: str) -> int:
    return int(getattr(os, f"ST_{name.upper()}"))
