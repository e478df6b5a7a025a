"""Isolation by docker or podman: a container without an image of its own, which shows the same folders as the others.

The image is empty and made on the spot, so nothing is downloaded; programs and libraries are the host's, mounted
read-only. A container takes some tenths of a second to start, much longer than the other back ends.
"""

from __future__ import annotations

import io
import secrets
import shutil
import subprocess
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from .launch import NOBODY, Launch, limited
from .limits import Limits
from .view import ENVIRONMENT, SCRATCH, View

_SECONDS = 120.0


@dataclass(frozen=True)
class Container:
    """The program `docker` or `podman`."""

    name: str

    def missing(self) -> str | None:
        """Whether the program is installed and answers."""
        if not shutil.which(self.name):
            return f"not installed (apt install {'docker.io' if self.name == 'docker' else self.name})"
        done = _call(self.name, "info")
        return None if done.returncode == 0 else f"`{self.name} info` fails: {_last_line(done.stderr)}"

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        """Run as `nobody` without network or capabilities."""
        container = f"hf-fastdecode-{secrets.token_hex(8)}"
        command = [self.name, "run", "--rm", "--interactive", "--init", "--name", container]
        command += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command += ["--user", f"{NOBODY}:{NOBODY}", "--workdir", str(SCRATCH), "--ipc", "none", "--log-driver", "none"]
        command += ["--pids-limit", str(limits.processes), "--memory", str(limits.memory_bytes)]
        command += ["--tmpfs", f"{SCRATCH}:rw,exec,nosuid,nodev,mode=1777,size={limits.scratch_bytes}"]
        for variable, value in ENVIRONMENT.items():
            command += ["--env", f"{variable}={value}"]
        for path in view.readable:
            command += ["--mount", f"type=bind,source={path},destination={path},readonly"]
        for path in view.hidden:
            command += ["--tmpfs", f"{path}:ro,size=4k"]
        links = tuple((str(path).lstrip("/"), target) for path, target in view.links)
        command += [_empty_image(self.name, links), *limited(argv, limits)]
        return Launch(command, stop=lambda: _kill(self.name, container))


@cache
def _empty_image(program: str, links: tuple[tuple[str, str], ...]) -> str:
    """The id of an image of nothing but symbolic links."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, target in links:
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    done = subprocess.run(
        [program, "import", "-"], input=archive.getvalue(), capture_output=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        raise OSError(f"`{program} import` fails: {_last_line(done.stderr)}")
    return done.stdout.decode().split()[-1]


def _kill(program: str, container: str) -> None:
    _call(program, "kill", container)


def _call(program: str, *args: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([program, *args], capture_output=True, timeout=_SECONDS, check=False)


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
