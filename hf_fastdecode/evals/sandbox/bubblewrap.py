"""Isolation by bubblewrap: every namespace unshared, an empty root that shows read-only folders, a sized tmpfs."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from .drop_root import sources, without_root
from .launch import NOBODY, Launch, first_process, limited, tool
from .limits import Limits
from .view import SCRATCH, View

_BWRAP_NAMESPACES: Final = [f"--unshare-{name}" for name in ("user", "pid", "net", "ipc", "uts", "cgroup")]


@dataclass(frozen=True)
class Bubblewrap:
    """The program `bwrap`."""

    name: str = "bwrap"

    def missing(self) -> str | None:
        """Whether `bwrap` is installed."""
        return None if shutil.which("bwrap") else "not installed (apt install bubblewrap)"

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        """Run as `nobody` in new namespaces."""
        paths = sources(view.readable)
        # Without user namespaces of its own the program cannot mount a tmpfs that has no size.
        command = [tool("bwrap"), *_BWRAP_NAMESPACES, "--disable-userns", "--die-with-parent", "--as-pid-1"]
        command += ["--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox", "--cap-drop", "ALL"]
        command += ["--proc", "/proc", "--dev", "/dev", "--remount-ro", "/dev"]
        command += ["--perms", "1777", "--size", str(limits.scratch_bytes), "--tmpfs", str(SCRATCH)]
        for path in sorted([*view.hidden, *paths]):  # a folder before what lies in it
            for parent in reversed(path.parents[:-1]):
                command += ["--perms", "0755", "--dir", str(parent)]  # it would make them for its own user only
            if path in paths:
                command += ["--ro-bind", str(paths[path]), str(path)]
            else:
                command += ["--size", "4096", "--tmpfs", str(path)]
        for path, target in view.links:
            command += ["--symlink", target, str(path)]
        for path in view.hidden:
            command += ["--remount-ro", str(path)]
        command += ["--remount-ro", "/", "--chdir", str(SCRATCH), "--", *first_process(limited(argv, limits))]
        return Launch(without_root(command, paths))
