"""Giving root away before a sandbox is made, so that root and an ordinary user get the same one.

A user namespace that root makes maps to root: its processes are exempt from RLIMIT_NPROC and own root's files. So root
becomes the user `nobody` first. Where `nobody` cannot reach a path that the program must read, such as an interpreter
in root's home, a private mount namespace shows it in a folder that everybody may enter.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from .launch import NOBODY, SandboxError, tool


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
    """An empty folder that everybody may enter; what is mounted on it is seen in private mount namespaces only.

    It stays for the next run: a process that is killed could not remove it.

    Raises:
        SandboxError: Another user has taken its name.
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
    """Whether every user may read a path and reach it."""
    entered = all(folder.stat().st_mode & stat.S_IXOTH for folder in path.parents)
    wanted = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
    return entered and path.stat().st_mode & wanted == wanted
