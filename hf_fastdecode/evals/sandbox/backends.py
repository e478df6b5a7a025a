"""Back ends: namespaces, made by bubblewrap or by util-linux alone, and containers of docker or podman."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import os
import secrets
import shlex
import shutil
import stat
import subprocess
import tarfile
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from .launch import (
    ENVIRONMENT,
    NOBODY,
    SCRATCH,
    Backend,
    Launch,
    Limits,
    SandboxError,
    View,
    first_process,
    limited,
    processes_with,
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


_SECONDS: Final = 120.0
_NAMESPACE_FLAGS: Final = 0x7E020000  # CLONE_NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET, NEWNS: sched.h
_PROCESSES_OF_NOBODY: Final = 4096  # in all containers together; --pids-limit is that of one


@dataclass(frozen=True)
class Container(Backend):
    name: str

    def missing(self) -> str | None:
        if not shutil.which(self.name):
            return f"not installed (apt install {'docker.io' if self.name == 'docker' else self.name})"
        done = _call(self.name, "info")
        return None if done.returncode == 0 else f"`{self.name} info` fails: {_last_line(done.stderr)}"

    def launch(self, argv: Sequence[str], view: View, limits: Limits) -> Launch:
        container = f"hf-fastdecode-{secrets.token_hex(8)}"
        command = [self.name, "run", "--rm", "--interactive", "--name", container]
        command += ["--network", "none", "--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"]
        command += _only_podman() if self.name == "podman" else []
        command += ["--user", f"{NOBODY}:{NOBODY}", "--workdir", str(SCRATCH), "--ipc", "none", "--log-driver", "none"]
        # The programs' defaults may be above what this user may set.
        command += ["--ulimit", f"nofile={limits.open_files}", "--ulimit", f"nproc={_PROCESSES_OF_NOBODY}"]
        command += ["--pids-limit", str(limits.processes), "--memory", str(limits.memory_bytes)]
        command += ["--tmpfs", f"{SCRATCH}:rw,exec,nosuid,nodev,mode=1777,size={limits.scratch_bytes}"]
        for variable, value in ENVIRONMENT.items():
            command += ["--env", f"{variable}={value}"]
        for path in view.readable:
            command += ["--mount", f"type=bind,source={path},destination={path},readonly"]
        empty = ",notmpcopyup" if self.name == "podman" else ""  # which would copy what a tmpfs covers into it
        for path in view.hidden:
            command += ["--mount", f"type=tmpfs,destination={path},tmpfs-size=4096,tmpfs-mode=0755{empty}"]
        links = tuple((str(path).lstrip("/"), target) for path, target in view.links)
        command += [_empty_image(self.name, links)]
        command += first_process(limited(argv, limits, processes=False), name=container)
        return Launch(
            command,
            environment=dict(os.environ),  # of the client, which finds daemon and storage by it
            # The first process, which is not a descendant of the client.
            holder=lambda: next((pid for pid, of in processes_with(container).items() if of[0] == b"/bin/sh"), None),
            kills_for_memory=True,
            stop=lambda: _call(self.name, "kill", container),
        )


@cache
def _empty_image(program: str, links: tuple[tuple[str, str], ...]) -> str:
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
    """Options that podman needs to be as docker: no other writable folders, and no user namespaces."""
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


def _call(program: str, *args: str, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    try:
        return subprocess.run([program, *args], input=stdin, capture_output=True, timeout=_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess([program], 1, b"", b"no answer")


def _last_line(text: bytes) -> str:
    lines = text.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "no message"
