"""Giving root away before a sandbox is made, so that root and an ordinary user get the same one.

A user namespace that root makes maps to root: its processes are exempt from RLIMIT_NPROC and own root's files. So root
becomes the user `nobody` first. Where `nobody` cannot reach a path that the program must read, such as an interpreter
in root's home, a private mount namespace shows it in a folder that everybody may enter.
"""

from __future__ import annotations

import atexit
import os
import shlex
import stat
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from .launch import NOBODY, tool


def sources(readable: Sequence[Path]) -> dict[Path, Path]:
    """Where the sandbox's maker finds each path: where it is, or in the folder that `without_root` fills."""
    if os.geteuid() != 0:
        return {path: path for path in readable}
    return {
        path: path if _open_to_all(path) else mount_point("paths") / str(number)
        for number, path in enumerate(readable)
    }


def without_root(command: Sequence[str], paths: dict[Path, Path]) -> list[str]:
    """The command as `nobody`, or as it is where this user is not root.

    Args:
        command: Makes the sandbox.
        paths: From `sources`.
    """
    if os.geteuid() != 0:
        return list(command)
    user = [f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups"]
    rights = ["--inh-caps=-all", "--bounding-set=-all", "--no-new-privs"]
    dropped = [tool("setpriv"), *user, *rights, "--", *command]
    staged = {path: place for path, place in paths.items() if place != path}
    if not staged:
        return dropped
    lines = [f"mount -t tmpfs -o size=1m,mode=755 tmpfs {mount_point('paths')}"]
    for path, place in staged.items():
        lines.append(f"mkdir {place}" if path.is_dir() else f": > {place}")
        lines.append(f"mount --rbind {shlex.quote(str(path))} {place}")
    script = " && ".join([*lines, 'exec "$@"'])
    return [tool("unshare"), "--mount", "--propagation", "private", "--", "/bin/sh", "-c", script, "sh", *dropped]


@cache
def mount_point(purpose: str) -> Path:
    """An empty folder that everybody may enter; what is mounted on it is seen in private mount namespaces only."""
    folder = Path(tempfile.mkdtemp(prefix=f"hf-fastdecode-{purpose}-", dir="/tmp"))
    folder.chmod(0o755)
    owner = os.getpid()
    atexit.register(lambda: folder.rmdir() if os.getpid() == owner else None)
    return folder


def _open_to_all(path: Path) -> bool:
    """Whether every user may read a path and reach it."""
    entered = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
    return entered and path.stat().st_mode & wanted == wanted
