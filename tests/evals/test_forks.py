"""Processes that are forked in a sandbox: isolation, limits, and servers that end."""

from __future__ import annotations

import gc
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.sandbox import (
    ForkServer,
    Limits,
    Sandbox,
    SandboxedProcess,
    SandboxError,
    prove_forks,
    python_command,
)
from hf_fastdecode.evals.sandbox.backends import Unshare
from hf_fastdecode.evals.sandbox.launch import children_of
from hf_fastdecode.evals.scoring import score
from hf_fastdecode.evals.scoring.python import PythonRunner

from . import leaving
from .processes import ANY, LIMITS, Edited, interpreter, killed, lives, output, run, running

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "user", "uts")


SEEN = """
import json, os, resource, signal
def read(path): return open(path).read()
status = read("/proc/self/status").splitlines()
kept = ("Uid", "Gid", "Groups", "Cap", "NoNew", "Sig", "Umask", "Threads", "Cpus_allowed:")
print(json.dumps({
    "status": [line for line in status if line.startswith(kept) and not line.startswith("SigQ")],
    "limits": [resource.getrlimit(number) for number in range(16)],
    "environment": sorted(os.environ.items()),
    "folder": [os.getcwd(), os.listdir("/tmp"), oct(os.stat("/tmp").st_mode), os.statvfs("/tmp").f_blocks],
    "root": sorted(os.listdir("/")),
    "devices": sorted(os.listdir("/dev")),
    "network": [line.split(":")[0] for line in read("/proc/net/dev").splitlines()],
    "descriptors": len(os.listdir("/proc/self/fd")),
    "interpreter": [sys.argv, sys.path, str(sys.flags), sys.getrecursionlimit(), sys.executable, sys.stdout.encoding],
    "signals": [str(signal.getsignal(number)) for number in range(1, 65)],
    "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
    "parent": os.getppid(),
    "order": [list({"one", "two", "three"}), hash("text")],
    "name": os.uname().nodename,
}))
"""


def test_a_forked_process_is_confined_as_a_new_interpreter(forking: Sandbox, server: ForkServer) -> None:
    command, readable = python_command()
    with forking.popen(
        [*command, "-c", "import sys; exec(sys.stdin.read())"], readable=readable, limits=LIMITS
    ) as new:
        expected = json.loads(output(new, SEEN))
    assert json.loads(run(server, SEEN)) == expected


def test_interrupts_that_its_host_ignores(forking: Sandbox) -> None:
    """As below nohup, where a new interpreter has no handler either."""
    own = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with forking.fork_server(ANY) as server:
            assert run(server, "import signal; print(signal.getsignal(2) is signal.SIG_IGN)") == "True\n"
    finally:
        signal.signal(signal.SIGINT, own)


def test_its_namespaces_are_its_own(server: ForkServer) -> None:
    source = f"import os\nfor name in {NAMESPACES}: print(os.readlink('/proc/self/ns/' + name))"
    inside = run(server, source).split()
    assert len(inside) == len(NAMESPACES)
    for pid in (os.getpid(), interpreter(server)):
        outside = [os.readlink(f"/proc/{pid}/ns/{name}") for name in NAMESPACES]
        assert not set(inside) & set(outside)


def test_it_sees_and_signals_its_own_processes_only(server: ForkServer) -> None:
    pids = {interpreter(server)}
    source = f"""
import os, signal
print(sorted(filter(str.isdigit, os.listdir("/proc"))))
for pid in (0, -1, 1, os.getppid(), *{sorted(pids)}):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGSTOP, signal.SIGKILL):
        if number != signal.SIGKILL or pid > 0:
            if os.fork() == 0:
                try: os.kill(pid, number)
                finally: os._exit(0)
            os.waitpid(-1, os.WUNTRACED)
print("alive")
"""
    signal_all = "signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.signal(signal.SIGINT, signal.SIG_IGN)"
    source = source.replace("import os, signal\n", f"import os, signal\n{signal_all}\n").replace("(0, -1, 1", "(1")
    assert run(server, source) == "['1', '2']\nalive\n"
    with server.fork(LIMITS) as process:
        output(process, "import os; os.kill(0, 9)")
        assert process.wait() == 128 + signal.SIGKILL
    with server.fork(LIMITS) as process:
        output(process, "import os\nif os.fork(): os.wait()\nelse: os.kill(-1, 9)")
        assert process.wait() == 128 + signal.SIGKILL, "not the first process, which nothing inside can kill"
    assert {interpreter(server)} == pids


def test_it_cannot_trace_or_read_the_processes_that_made_it(server: ForkServer) -> None:
    source = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
def denied(attempt):
    try: return attempt() == -1
    except PermissionError: return True
print([
    denied(lambda: libc.ptrace(16, 1, None, None)),
    denied(lambda: libc.ptrace(0x4206, 1, None, None)),
    denied(lambda: libc.syscall(438, os.pidfd_open(1), 3, 0)),
    *(denied(lambda: open("/proc/1/" + name, "rb").read(1)) for name in ("mem", "maps", "environ", "auxv", "stack")),
    denied(lambda: os.readlink("/proc/1/fd/0")),
    denied(lambda: os.readlink("/proc/1/root")),
])
"""
    assert run(server, source) == f"{[True] * 10}\n"


def test_it_holds_no_descriptor_but_its_streams(server: ForkServer) -> None:
    source = "import os; print([n for n in range(1024) if os.path.exists(f'/proc/self/fd/{n}')])"
    assert run(server, source) == "[0, 1, 2]\n"


@pytest.mark.parametrize("name", ["add_key", "request_key", "keyctl"])
def test_it_has_no_keys(server: ForkServer, name: str) -> None:
    numbers = {"x86_64": (248, 249, 250), "aarch64": (217, 218, 219)}[os.uname().machine]
    number = numbers[("add_key", "request_key", "keyctl").index(name)]
    source = (
        f"import ctypes, os; c = ctypes.CDLL(None, use_errno=True)\nprint(c.syscall({number}, 0), ctypes.get_errno())"
    )
    assert run(server, source) == "-1 38\n"


def test_chance_differs_and_order_does_not(server: ForkServer) -> None:
    source = (
        "import random, uuid, tempfile, os; print(random.random(), uuid.uuid4(), tempfile.mktemp(), os.urandom(9))"
    )
    first, second = run(server, source).split(), run(server, source).split()
    assert not set(first) & set(second)
    assert run(server, "print({'a', 'b', 'c'})") == run(server, "print({'a', 'b', 'c'})")


def test_imports_leave_no_more_than_a_program_gets_by_its_own(server: ForkServer) -> None:
    """A submodule that the server had imported would be found by programs that forget to import it."""
    source = """
import sys
for name in sorted(sys.modules):
    if hasattr(sys.modules[name], "__path__"):
        print(name, *sorted(one for one in vars(sys.modules[name]) if f"{name}.{one}" in sys.modules))
"""
    lines = [line.split() for line in run(server, source).splitlines()]
    assert "collections" in [package for package, *_ in lines]
    command, _ = python_command()
    for package, *submodules in lines:
        alone = f"import sys, {package}; print(*(one for one in vars({package}) if '{package}.' + one in sys.modules))"
        done = subprocess.run([*command, "-c", alone], capture_output=True, text=True, check=True)
        assert set(submodules) <= set(done.stdout.split()), package


def test_nothing_that_a_process_reads_or_writes_stays_in_the_server(server: ForkServer) -> None:
    token = secrets.token_hex(16)
    pid = interpreter(server)
    run(server, f"x = '{token}' * 1000; print(x)")
    assert token.encode() not in memory(pid)
    assert b"scratch_bytes" in memory(pid), "it was searched"
    search = f"""
import re
wanted = bytes.fromhex("{token.encode()[::-1].hex()}")[::-1]
with open("/proc/self/mem", "rb", 0) as memory, open("/proc/self/maps") as maps:
    for line in maps.read().splitlines():
        start, end = (int(one, 16) for one in line.split()[0].split("-"))
        if line.split()[1][0] == "r" and "[v" not in line:
            memory.seek(start)
            print(memory.read(end - start).count(wanted))
"""
    counts = [int(one) for one in run(server, search).split()]
    assert len(counts) > 20
    assert sum(counts) <= 4, "only what the search itself has read"


def test_no_test_nonce_or_program_stays_in_the_servers_of_a_runner(forking: Sandbox) -> None:
    words = [secrets.token_hex(16) for _ in range(2)]
    task = Task("1", "python", "", "", (f"assert f() == {words[0]!r}",))
    with PythonRunner(forking, LIMITS) as runner:
        assert runner.check(task, f"def f(): return {words[0]!r} or {words[1]!r}").status == "pass"
        for server in runner._fork_servers.values():
            found = memory(interpreter(server))
            assert not any(word.encode() in found for word in words)
        assert len(runner._fork_servers) == 2


def memory(pid: int) -> bytes:
    """All memory that a process may write."""
    found = b""
    try:
        with open(f"/proc/{pid}/mem", "rb", 0) as file:
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                start, end = (int(one, 16) for one in line.split()[0].split("-"))
                if line.split()[1].startswith("rw"):
                    file.seek(start)
                    found += file.read(end - start)
    except PermissionError:
        pytest.skip("only root reads the memory of a process that is not dumpable")
    return found


def test_a_server_does_not_grow(server: ForkServer) -> None:
    def used() -> tuple[int, int]:
        pid = interpreter(server)
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        resident = next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))
        return resident, len(os.listdir(f"/proc/{pid}/fd"))

    run(server, "pass")
    before, here = used(), len(os.listdir("/proc/self/fd"))
    for number in range(30):
        run(
            server,
            "import os, time\nfor _ in range(9):\n    if os.fork() == 0: time.sleep(60 if _ % 2 else 0); os._exit(0)",
        )
        with server.fork(LIMITS) as process:
            process.send(b"while True: pass" if number % 2 else b"")
        server.prepare()
    run(server, "pass")
    until = time.monotonic() + 60
    while children_of(interpreter(server)) and time.monotonic() < until:
        time.sleep(0.01)  # what held the last ones ends after them
    assert not children_of(interpreter(server))
    resident, descriptors = used()
    assert resident < before[0] + 1024
    assert descriptors == before[1]
    assert len(os.listdir("/proc/self/fd")) == here


def test_a_prepared_process_is_as_another(server: ForkServer) -> None:
    source = "import os, resource; print(os.listdir(), resource.getrlimit(resource.RLIMIT_NOFILE))"
    server.prepare()  # nobody knows the limits
    assert run(server, source) == "[] (64, 64)\n"
    server.prepare()
    server.prepare()
    assert run(server, source) == "[] (64, 64)\n"
    server.prepare()
    assert run(server, source, replace(LIMITS, open_files=32)) == "[] (32, 32)\n"
    server.prepare()
    killed(interpreter(server))
    with pytest.raises(SandboxError, match="no process can be forked"):
        server.fork(LIMITS)


@pytest.fixture
def unshare() -> Unshare:
    if prove_forks(Unshare()):
        pytest.skip("it cannot fork here")
    return Unshare()


@pytest.mark.parametrize(
    ("old", "new", "escape"),
    [
        (
            '_call("mount", b"tmpfs", b"/tmp"',
            '_call("chroot", b"/") if True else _call("mount"',
            "holds what others left",
        ),
        ('_write("/proc/sys/user/max_user_namespaces", "0")', "pass", "it makes user namespaces"),
        ('_call("capset", ', '(lambda *ignored: None)("capset", ', "it keeps root or capabilities"),
        ("_prctl(_DROP, capability)", "pass", "it keeps root or capabilities"),
        (
            'for name, limits in request["resources"].items()',
            "for name, limits in ()",
            "limit on processes does not bind",
        ),
        ("size={request['scratch_bytes']}", "size=8388608", "takes more than its size"),
    ],
)
def test_each_hole_is_seen_by_the_proof(unshare: Unshare, old: str, new: str, escape: str) -> None:
    assert re.search(escape, str(prove_forks(Edited(edits=((old, new),)))))


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("leave-ipc-objects", "0x6E020000", "0x66020000"),
        ("leave-network-counters", "0x6E020000", "0x2E020000"),
        ("leave-keys", "    _deny_keys()\n", ""),
        ("leave-files", '_call("mount", b"tmpfs", b"/tmp"', '_call("chroot", b"/") if True else _call("mount"'),
    ],
)
def test_each_hole_is_noticed_by_the_next_program(unshare: Unshare, name: str, old: str, new: str) -> None:
    texts = [leaving.NOTICES + "print(answer())", leaving.PROGRAMS[name][0], leaving.NOTICES + "print(answer())"]

    def said(server: ForkServer) -> list[str]:
        results = []
        for text in texts:
            with server.fork(LIMITS) as process:
                results.append(output(process, text))
        return results

    with ForkServer(unshare, ANY) as server:
        before, _, after = said(server)
        assert len(before) > 1000
        assert after == before
    with ForkServer(Edited(edits=((old, new),)), ANY) as server:
        before, _, after = said(server)
        assert after != before


def test_without_a_fork_server_each_program_gets_a_new_interpreter(
    unshare: Unshare, caplog: pytest.LogCaptureFixture
) -> None:
    sandbox = Sandbox(Edited(edits=(("_prctl(_DIE_WITH_PARENT", 'raise OSError("no rights")  # '),)))
    task = Task("1", "python", "", "", ("assert f() == 1",))
    with PythonRunner(sandbox, LIMITS) as runner:
        for _ in range(2):
            assert runner.check(task, "def f(): return 1").status == "pass"
        assert not runner._fork_servers
    assert [one.message for one in caplog.records if "no rights" in one.message]
    assert len(caplog.records) == 1
    assert not Sandbox(unshare, may_fork=False).forks


def test_a_dead_server_is_noticed_and_replaced(forking: Sandbox) -> None:
    task = Task("1", "python", "", "", ("assert f() == 1",))
    with PythonRunner(forking, LIMITS) as runner:
        assert runner.check(task, "def f(): return 1").status == "pass"
        for role in ("server", "candidate"):
            dead = runner._fork_servers[role]
            killed(interpreter(dead))
            assert runner.check(task, "def f(): return 1").status == "pass"
            assert runner._fork_servers[role] is not dead


def test_a_server_that_dies_takes_its_process_with_it(server: ForkServer) -> None:
    pid = interpreter(server)
    with server.fork(LIMITS) as process:
        process.send(b"import time; time.sleep(60)")
        process.close_input()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(SandboxError, match="what held the sandbox ended before it"):
            process.wait()
    with pytest.raises(SandboxError, match="no process can be forked"):
        server.fork(LIMITS)


def test_a_process_that_lost_its_server_is_a_sandbox_error_and_tried_again(
    forking: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead: list[int] = []
    fork = ForkServer.fork

    def fork_and_die(self: ForkServer, limits: Limits) -> SandboxedProcess:
        pid = interpreter(self)
        process = fork(self, limits)
        if not dead:
            dead.append(pid)
            os.kill(pid, signal.SIGKILL)
        return process

    monkeypatch.setattr(ForkServer, "fork", fork_and_die)
    task = Task("1", "python", "", "", ("assert f() == 1",))
    (verdict,) = score({"1": task}, [Sample("1", 0, "def f(): return 1")], sandbox=forking, workers=1, progress=False)
    assert dead
    assert verdict.passed


@pytest.mark.parametrize("how", ["close", "forget"])
def test_an_end_leaves_no_process(forking: Sandbox, how: str) -> None:
    server: ForkServer | None = forking.fork_server(ANY)
    assert server is not None
    pids = [server.pid, interpreter(server)]
    if how == "close":
        server.close()
    server = None
    gc.collect()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_server_dies_with_its_host(forking: Sandbox, number: int) -> None:
    token = f"host-{secrets.token_hex(8)}"
    source = f"""
import signal, sys
from hf_fastdecode.evals.sandbox import ForkedPython, Limits, choose
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
server = choose({forking.name!r}).fork_server(ForkedPython((), (), "exec(sys.stdin.read())"))
process = server.fork(Limits())
process.send(b"import os, time; os.execv('/bin/sleep', [{token!r}, '600'])")
process.close_input()
print(server.pid, flush=True)
process.receive()
"""
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as host:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        until = time.monotonic() + 60
        while not running(token) and time.monotonic() < until:
            time.sleep(0.01)
        assert running(token)
        host.send_signal(number)
        host.wait(60)
    until = time.monotonic() + 60
    while (running(token) or lives(pid)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not running(token)
    assert not lives(pid)
