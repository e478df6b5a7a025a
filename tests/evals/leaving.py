"""Hostile programs that leave something for the next program of the same sandbox, and a program that would notice."""

from __future__ import annotations

from typing import Final

_FILES: Final = """
import os
for name in ("a", ".b", "c/d/e"):
    os.makedirs(os.path.dirname("/tmp/" + name), exist_ok=True)
    open("/tmp/" + name, "w").write("left")
os.mkfifo("/tmp/f")
os.chmod("/tmp", 0)
"""

_SPACE: Final = """
try:
    for number in range(9): open(f"/tmp/{number}", "wb").write(bytes(4 << 20))
except OSError: pass
"""

_INODES: Final = """
import os
try:
    for number in range(9999): os.mkdir(f"/tmp/{number}")
except OSError: pass
"""

_EVERY_FILE: Final = """
import os
for folder in ("/", "/dev", "/dev/pts", "/tmp", "/proc/1", "/proc/sys/kernel", "/proc/sys/user"):
    for name in [".", *(os.listdir(folder) if os.path.isdir(folder) else [])]:
        path = os.path.join(folder, name)
        for change in (
            lambda: os.chmod(path, 0),
            lambda: os.utime(path, (1, 1)),
            lambda: os.setxattr(path, "user.left", b"x"),
            lambda: os.write(os.open(path, os.O_WRONLY | os.O_NONBLOCK), b"1"),
            lambda: os.unlink(path),
        ):
            try: change()
            except OSError: pass
"""

_C: Final = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
"""

_OBJECTS: Final = (
    _C
    + """
for key in range(1, 9):
    libc.shmget(key, 4096, 0o1666)
    libc.msgget(key, 0o1666)
    libc.semget(key, 1, 0o1666)
libc.mq_open(b"/left", 0o102, 0o666, None)
"""
)

_KEYS: Final = (
    _C
    + """
for number in (248, 217):
    for ring in (-3, -4, -5, -8):
        libc.syscall(number, b"user", b"left", b"left", ctypes.c_size_t(4), ring)
"""
)

_SOCKET: Final = """
import os, socket, time
one = socket.socket(socket.AF_UNIX)
one.bind("\\0left")
one.listen()
if os.fork() == 0:
    os.setsid()
    time.sleep(60)
"""

_COUNTERS: Final = """
import socket
for family, here in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    for port in range(1, 50):
        try: socket.socket(family, socket.SOCK_DGRAM).sendto(b"x", (here, port))
        except OSError: pass
"""

_NAMES: Final = _C + 'libc.sethostname(b"left", 4)\nlibc.setdomainname(b"left", 4)\n'

_SIGNALS: Final = """
import os, signal
for number in range(1, 65):
    try: signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError): pass
for pid in {0, -1, 1, os.getppid(), -os.getpgrp(), *range(3, 400)}:
    for number in (2, 15, 1, 10, 64):
        try: os.kill(pid, number)
        except OSError: pass
"""

_STOP: Final = """
import os, signal
for pid in {1, os.getppid(), *range(3, 400)} - {os.getpid()}:
    if os.fork() == 0:
        try: os.kill(pid, signal.SIGSTOP)
        finally: os._exit(0)
    os.waitpid(-1, os.WUNTRACED)
"""

_TRACE: Final = (
    _C
    + """
for pid in (1, os.getppid()):
    for request in (16, 0x4206):
        if libc.ptrace(request, pid, None, None) == 0: raise SystemError("traced")
    for name in ("mem", "environ", "fd", "maps", "oom_score_adj", "setgroups"):
        try: open(f"/proc/{pid}/{name}", "r+b").write(b"1")
        except OSError: pass
    try: libc.syscall(438, os.pidfd_open(pid), 3, 0)
    except OSError: pass
"""
)

_PRIORITIES: Final = """
import os
for which in (os.PRIO_PROCESS, os.PRIO_PGRP, os.PRIO_USER):
    for who in (0, 1, 65534):
        try: os.setpriority(which, who, 19)
        except OSError: pass
for pid in (0, 1):
    try: os.sched_setaffinity(pid, {min(os.sched_getaffinity(0))})
    except OSError: pass
open("/proc/self/oom_score_adj", "w").write("1000")
"""

_LIMITS: Final = """
import resource
for number in set(range(16)) - {resource.RLIMIT_DATA, resource.RLIMIT_AS}:
    for pid in (1, 0):
        try: resource.prlimit(pid, number, (1, 1))
        except (OSError, ValueError): pass
"""

_MODULES: Final = """
import builtins, collections, json, math, os, random, re, sys
math.sqrt = math.floor = re.sub = lambda *a: 0
json.dumps = os.listdir = lambda *a: "left"
random.seed(1)
collections.Counter = dict
os.environ["LEFT"] = "1"
os.umask(0)
os.chdir("/")
sys.setrecursionlimit(99999)
sys.path.insert(0, "/tmp")
sys.modules["heapq"] = None
builtins.left = 1
"""

_DESCRIPTORS: Final = """
import os
for number in range(3, 1024):
    try: os.write(number, b'{"scratch_bytes": 1}')
    except OSError: pass
"""

PROGRAMS: Final[dict[str, tuple[str, set[str]]]] = {
    name: (f"{text}\ndef answer(x): return x\n", statuses)
    for name, text, statuses in (
        ("leave-files", _FILES, {"fail"}),
        ("leave-no-space", _SPACE, {"fail"}),
        ("leave-no-inodes", _INODES, {"fail"}),
        ("leave-ipc-objects", _OBJECTS, {"fail"}),
        ("leave-keys", _KEYS, {"fail"}),
        ("leave-a-socket", _SOCKET, {"fail"}),
        ("leave-network-counters", _COUNTERS, {"fail"}),
        ("change-every-file", _EVERY_FILE, {"fail"}),
        ("change-names", _NAMES, {"fail"}),
        ("change-priorities", _PRIORITIES, {"fail"}),
        ("change-limits", _LIMITS, {"fail", "timeout", "memory"}),
        ("change-modules", _MODULES, {"fail"}),
        ("signal-everything", _SIGNALS, {"fail"}),
        ("stop-everything", _STOP, {"fail"}),
        ("trace-the-parent", _TRACE, {"fail"}),
        ("write-to-every-descriptor", _DESCRIPTORS, {"output"}),
    )
}
"""Text and possible statuses, as in `hostile.PROGRAMS`."""

NOTICES: Final = """
import builtins, collections, heapq, json, math, os, random, re, resource, signal, socket, sys

def read(path):
    try:
        with open(path) as file:
            return file.read()
    except OSError as error:
        return error.strerror

def listed(folder):
    try:
        names = sorted(os.listdir(folder))
    except OSError as error:
        return error.strerror
    found = [(name, os.lstat(os.path.join(folder, name))) for name in [".", *names]]
    return [(name, oct(one.st_mode), one.st_uid, one.st_gid) for name, one in found]

def connected(name):
    with socket.socket(socket.AF_UNIX) as one:
        return one.connect_ex(name)

def answer():
    kept = ("Uid", "Gid", "Groups", "Sig", "ShdPnd", "Cap", "NoNew", "Cpus_allowed:", "Umask", "Tracer", "Threads")
    space = os.statvfs("/tmp")
    facts = {
        "status": [line for line in read("/proc/self/status").splitlines() if line.startswith(kept)],
        "processes": sorted(filter(str.isdigit, os.listdir("/proc"))),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "folders": [listed(folder) for folder in ("/", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/tmp")],
        "space": [space.f_blocks, space.f_bfree, space.f_files - space.f_ffree],
        "mounts": read("/proc/mounts"),
        "objects": [read("/proc/sysvipc/" + name) for name in ("shm", "msg", "sem")],
        "keys": read("/proc/keys").count("left"),
        "network": [*(read("/proc/net/" + name) for name in ("snmp", "netstat", "dev")), connected("\\0left")],
        "names": [os.uname().nodename, read("/proc/sys/kernel/domainname")],
        "priorities": [os.nice(0), read("/proc/self/oom_score_adj"), sorted(os.sched_getaffinity(0))],
        "parent": read("/proc/1/oom_score_adj"),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "signals": [str(signal.getsignal(number)) for number in range(1, 65)],
        "environment": sorted(os.environ.items()),
        "interpreter": [os.getcwd(), sys.path, sys.argv, sys.getrecursionlimit(), sorted(vars(builtins))],
        "modules": sorted(sys.modules),
        "results": [math.sqrt(4), re.sub("a", "b", "aa"), collections.Counter("aab"), heapq.nsmallest(1, [2, 1])],
        "orders": [list({"one", "two", "three"}), random.Random(1).random()],
    }
    return json.dumps(facts)
"""
"""Returns all that an earlier program could have changed; equal in each run."""
