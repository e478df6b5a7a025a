"""Isolation by docker or podman: a container without an image of its own, which shows the same folders as the others.

The image is empty and made on the spot, so nothing is downloaded; programs and libraries are the host's, mounted
read-only. A container takes some tenths of a second to start, much longer than the other back ends.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import secrets
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from .launch import ENVIRONMENT, NOBODY, SCRATCH, Launch, SandboxError, View, first_process, limited
from .limits import Limits

_SECONDS: Final = 120.0
_NAMESPACE_FLAGS: Final = 0x7E020000  # CLONE_NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWNS: sched.h
_PROCESSES_OF_NOBODY: Final = 4096  # in all containers together; --pids-limit is that of one


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
        command = [self.name, "run", "--rm", "--interactive", "--name", container]
        command += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command += _only_podman() if self.name == "podman" else []
        command += ["--user", f"{NOBODY}:{NOBODY}", "--workdir", str(SCRATCH), "--ipc", "none", "--log-driver", "none"]
        # The programs' own defaults may be above what this user may set.
        command += ["--ulimit", f"nofile={limits.open_files}", "--ulimit", f"nproc={_PROCESSES_OF_NOBODY}"]
        command += ["--pids-limit", str(limits.processes), "--memory", str(limits.memory_bytes)]
        command += ["--tmpfs", f"{SCRATCH}:rw,exec,nosuid,nodev,mode=1777,size={limits.scratch_bytes}"]
        for variable, value in ENVIRONMENT.items():
            command += ["--env", f"{variable}={value}"]
        for path in view.readable:
            command += ["--mount", f"type=bind,source={path},destination={path},readonly"]
        for path in view.hidden:
            command += ["--mount", f"type=tmpfs,destination={path},tmpfs-size=4096,tmpfs-mode=0755{self._as_it_is}"]
        links = tuple((str(path).lstrip("/"), target) for path, target in view.links)
        command += [_empty_image(self.name, links)]
        command += first_process(limited(argv, limits, processes=False), name=container)
        return Launch(
            command,
            environment=dict(
                os.environ
            ),  # of the client, which finds daemon and storage by it; the container has its own
            holder=lambda: _process_with_argument(container),
            kills_for_memory=True,
            stop=lambda: _kill(self.name, container),
        )

    def launch_fork_server(self, argv: Sequence[str], view: View) -> Launch | None:
        """None: a container has no rights to make namespaces."""
        return None

    @property
    def _as_it_is(self) -> str:
        """Has podman not fill a tmpfs with what it covers."""
        return ",notmpcopyup" if self.name == "podman" else ""


@cache
def _empty_image(program: str, links: tuple[tuple[str, str], ...]) -> str:
    """The id of an image of nothing but symbolic links."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path, target in links:
            member = tarfile.TarInfo(path)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    done = _call(program, "import", "-", stdin=archive.getvalue())
    if done.returncode:
        raise SandboxError(f"`{program} import` fails: {_last_line(done.stderr)}")
    return done.stdout.decode().split()[-1]


@cache
def _only_podman() -> list[str]:
    """As docker by default: no other writable folders, and no user namespaces, in which a tmpfs has no size."""
    found = _call("podman", "info", "--format", "{{.Host.Security.SECCOMPProfilePath}}").stdout.decode().strip()
    if not Path(found).is_file():
        return ["--read-only-tmpfs=false"]
    profile = json.loads(Path(found).read_text(encoding="utf-8"))
    for rule in profile["syscalls"]:
        if rule["action"] == "SCMP_ACT_ALLOW":
            rule["names"] = [name for name in rule["names"] if name not in ("clone", "clone3", "unshare", "setns")]
    no_namespace = {"index": 0, "value": _NAMESPACE_FLAGS, "valueTwo": 0, "op": "SCMP_CMP_MASKED_EQ"}
    profile["syscalls"].append({"names": ["clone"], "action": "SCMP_ACT_ALLOW", "args": [no_namespace]})
    with tempfile.NamedTemporaryFile("w", prefix="hf-fastdecode-seccomp-", suffix=".json", delete=False) as file:
        json.dump(profile, file)
    atexit.register(Path(file.name).unlink, missing_ok=True)
    return ["--read-only-tmpfs=false", "--security-opt", f"seccomp={file.name}"]


def _process_with_argument(text: str) -> int | None:
    """The first process of a container; it is not a descendant of the client."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if words[:1] == [b"/bin/sh"] and text.encode() in words:
            return int(process.name)
    return None


def _kill(program: str, container: str) -> None:
    _call(program, "kill", container)


def _call(program: str, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run([program, *args], input=stdin, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([program], 1, b"", b"no answer")


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
