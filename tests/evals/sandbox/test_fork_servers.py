"""How servers that fork end, and what a runner does then."""

from __future__ import annotations

import gc
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.sandbox import (
    ForkServer,
    Limits,
    Sandbox,
    SandboxedProcess,
    SandboxError,
)
from hf_fastdecode.evals.scoring import score
from hf_fastdecode.evals.scoring.python import PythonRunner

from ..processes import running
from .forking import ANY, LIMITS, interpreter, killed, lives


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
import sys
from hf_fastdecode.evals.sandbox import ForkedPython, Limits, choose
server = choose({forking.name!r}).fork_server(ForkedPython((), (), "exec(sys.stdin.read())"))
process = server.fork(Limits())
process.send(b"import os, time; os.execv('/bin/sleep', [{token!r}, '60'])")
process.close_input()
print(server.pid, flush=True)
process.receive()
"""
    command = [sys.executable, "-c", source]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as host:
        assert host.stdout is not None
        pid = int(host.stdout.readline())
        until = time.monotonic() + 30
        while not running(token) and time.monotonic() < until:
            time.sleep(0.01)
        assert running(token)
        host.send_signal(number)
        host.wait(30)
    while (running(token) or lives(pid)) and time.monotonic() < until:
        time.sleep(0.01)
    assert not running(token)
    assert not lives(pid)
