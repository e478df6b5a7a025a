"""Tries to escape from a sandbox and reports the attempts that succeed. Runs inside, on the standard library alone."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from typing import Any

_NEW_USER_NAMESPACE = 0x10000000  # CLONE_NEWUSER: sched.h


def main() -> None:
    """Read the attempts as a line of JSON, write those that succeeded as another, and leave a file and a process.

    That process is a grandchild in a new session, which never ends by itself.
    """
    job = json.loads(sys.stdin.readline())
    escapes = [said for said, attempt in ATTEMPTS.items() if _succeeds(attempt, job)]
    with open("left", "w"):
        pass
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(3600)
        os._exit(0)
    os.wait()
    os.write(1, (json.dumps(escapes) + "\n").encode())
    sys.stdin.read()  # until the host has found the grandchild


def _succeeds(attempt: Any, job: dict[str, Any]) -> bool:
    try:
        return bool(attempt(job))
    except (OSError, MemoryError):
        return False


def _network(job: dict[str, Any]) -> bool:
    with open("/proc/net/dev") as devices:
        names = {line.partition(":")[0].strip() for line in list(devices)[2:]}
    if names - {"lo", "sit0", "ip6tnl0", "tunl0"}:  # the kernel makes the latter in every network namespace
        return True
    socket.create_connection(("127.0.0.1", job["port"]), timeout=2).close()
    return True


def _write(job: dict[str, Any]) -> bool:
    with open("/proc/self/mountinfo") as mounts:  # a message queue is small: RLIMIT_MSGQUEUE
        folders = {line.split()[4] for line in mounts if " - mqueue " not in line}
    folders |= {job["home"], "/usr", "/etc", "/var", "/dev/shm"}
    for folder in sorted(folders - {job["scratch"]}):
        name = f"{folder}/hf-fastdecode-probe-{os.getpid()}"
        with contextlib.suppress(OSError), open(name, "x"):
            os.unlink(name)
            return True
    return False


def _fill(job: dict[str, Any]) -> bool:
    names = [f"fill-{number}" for number in range(4)]
    try:
        for name in names:
            with open(name, "wb") as file:
                file.write(bytes(job["scratch_bytes"] // 2))
    finally:
        for name in filter(os.path.exists, names):
            os.unlink(name)
    return True


def _processes(job: dict[str, Any]) -> bool:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/cmdline", "rb") as arguments:
            if job["token"].encode() in arguments.read().split(b"\0"):
                return True
    os.kill(job["pid"], signal.SIGKILL)
    return True


def _root(job: dict[str, Any]) -> bool:
    with open("/proc/self/status") as status:
        fields = dict(line.rstrip("\n").split(":\t", 1) for line in status)
    capabilities = int(fields["CapEff"], 16) | int(fields["CapPrm"], 16) | int(fields["CapBnd"], 16)
    return os.getuid() == 0 or os.geteuid() == 0 or capabilities != 0 or fields["NoNewPrivs"] != "1"


def _namespaces(job: dict[str, Any]) -> bool:
    """Make a user namespace, in which mounts without a size could be made."""
    import ctypes

    if (child := os.fork()) == 0:
        os._exit(ctypes.CDLL(None).unshare(_NEW_USER_NAMESPACE) != 0)
    return os.waitpid(child, 0)[1] == 0


def _forks(job: dict[str, Any]) -> bool:
    children = []
    try:
        for _ in range(job["processes"] + 1):
            child = os.fork()
            if child == 0:
                time.sleep(60)
                os._exit(0)
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    return True


ATTEMPTS = {
    "it reaches the network": _network,
    "it sees the home folder": lambda job: not set(os.listdir(job["home"])) <= set(job["shown_of_home"]),
    "it sees files of the host's temporary folder": lambda job: os.path.exists(job["file"]),
    "it writes outside its folder": _write,
    "its folder holds what others left": lambda job: os.listdir(job["scratch"]),
    "its folder takes more than its size": _fill,
    "it sees or kills processes of the host": _processes,
    "it keeps root or capabilities": _root,
    "it makes user namespaces": _namespaces,
    "the limit on processes does not bind": _forks,
    "the limit on memory does not bind": lambda job: bytearray(job["memory_bytes"] + 1),
}

if __name__ == "__main__":
    main()
