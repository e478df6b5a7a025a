"""The two processes of a check: the nonce, and a process of the tests that breaks down."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox, SandboxError, python_command
from hf_fastdecode.evals.scoring import LANGUAGES, LanguageSupport, Result, score
from hf_fastdecode.evals.scoring.runner import BrokenServerError, PairRunner, Role

LIMITS = Limits(cpu_seconds=0.5, wall_seconds=3)
TASK = Task("1", "python", "", "", ("right",))

_MESSAGES = """
import os, struct, sys
def read(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit()
    return data
def number():
    return struct.unpack(">I", read(4))[0]
def receive():
    return [read(number()) for _ in range(number())]
def send(*parts):
    os.write(1, struct.pack(">I", len(parts)) + b"".join(struct.pack(">I", len(part)) + part for part in parts))
send(b"started")
"""
_SERVER = """
previous = b"0" * 32
while True:
    test, nonce = receive()
    send(b"call", b"")
    value = receive()[1]
    while value == b"spin": pass
    if value == b"long": send(b"call", bytes(5 << 20))
    if value == b"full": send(b"memory", b"MemoryError")
    if value == b"exit": sys.exit(3)
    if value == b"kill": os.kill(os.getpid(), 9)
    if value == b"replay": send(b"pass", b"", previous)
    elif value == b"without": send(b"pass", b"")
    elif value == test: send(b"pass", b"", nonce)
    else: send(b"fail", b"wrong")
    previous = nonce
"""
_CANDIDATE = """
program, = receive()
send(b"ready")
while True:
    receive()
    send(b"value", program)
"""
_SCRIPTS: dict[Role, str] = {"server": _MESSAGES + _SERVER, "candidate": _MESSAGES + _CANDIDATE}


class EchoRunner(PairRunner):
    """A program is the value that it returns; the tests expect their own text, and break down at certain values."""

    def _check(self, task: Task, completion: str) -> Result:
        return self._tested([completion], [*task.tests])

    def _launch(self, role: Role) -> tuple[list[str], list[Path]]:
        command, readable = python_command()
        return [*command, "-c", _SCRIPTS[role]], list(readable)


@pytest.fixture
def runner(any_sandbox: Sandbox) -> Iterator[EchoRunner]:
    with EchoRunner(any_sandbox, LIMITS) as found:
        yield found


def test_a_pass_is_the_nonce_of_the_check(runner: EchoRunner) -> None:
    for _ in range(2):
        assert runner.check(TASK, "right") == Result("pass")
        assert runner.check(TASK, "other") == Result("fail", "wrong")
        for other in ("replay", "without"):
            with pytest.raises(SandboxError, match="wrong nonce"):
                runner.check(TASK, other)


@pytest.mark.parametrize(
    ("value", "status", "detail"),
    [
        ("spin", "timeout", "the tests used more than 0.5 s of CPU time"),
        ("long", "output", "the tests gave a result of more than 4,194,304 bytes"),
        ("full", "memory", "MemoryError"),
    ],
)
def test_a_limit_that_a_new_process_meets_is_the_programs(
    runner: EchoRunner, value: str, status: str, detail: str
) -> None:
    result = runner.check(TASK, value)
    assert (result.status, result.detail) == (status, detail)
    assert runner.check(TASK, "right") == Result("pass")
    with pytest.raises(BrokenServerError) as error:  # it has judged another program before
        runner.check(TASK, value)
    assert error.value.result.status == status
    assert runner.check(TASK, "right") == Result("pass")


@pytest.mark.parametrize(("value", "code", "load"), [("exit", 3, False), ("kill", 137, True)])
def test_an_end_of_the_tests_process_is_never_certain(runner: EchoRunner, value: str, code: int, load: bool) -> None:
    with pytest.raises(BrokenServerError, match=f"the tests ended with exit code {code}") as error:
        runner.check(TASK, value)
    assert (error.value.result.status, error.value.result.load) == ("fail", load)
    assert runner.check(TASK, "right") == Result("pass")


def test_no_program_leaves_its_pool(any_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LANGUAGES, "python", LanguageSupport(EchoRunner, LIMITS))
    values = ["right", "exit", "kill", "spin", "wrong"]
    samples = [Sample("1", index, value) for index, value in enumerate(values)]
    verdicts = score({"1": TASK}, samples, sandbox=any_sandbox, workers=1, progress=False)
    assert [one.status for one in verdicts] == ["pass", "fail", "fail", "timeout", "fail"]
    (alone,) = score({"1": TASK}, [Sample("1", 0, "kill")], sandbox=any_sandbox, workers=1, progress=False)
    assert alone.status == "sandbox_error", "no program shows that the tests work"


def test_a_process_that_does_not_start_says_nothing_about_the_program(
    any_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("server", "candidate"):
        with monkeypatch.context() as patched, EchoRunner(any_sandbox, LIMITS) as runner:
            patched.setitem(_SCRIPTS, role, "import sys; sys.exit('no memory')")
            with pytest.raises(SandboxError, match="does not start: no memory"):
                runner.check(TASK, "right")
