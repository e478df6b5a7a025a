"""None of the hostile programs passes, none escapes, and the run goes on."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox
from hf_fastdecode.evals.scoring import score
from hf_fastdecode.evals.scoring.python import PythonRunner

from . import leaving
from .hostile import DEPEND_ON_THE_SANDBOX, PROGRAMS, SEARCH_FOR_TESTS
from .processes import running

pytestmark = pytest.mark.exhaustive

LIMITS = Limits(
    cpu_seconds=0.6,
    wall_seconds=15,
    memory_bytes=256 << 20,
    address_bytes=1 << 30,
    file_bytes=8 << 20,
    open_files=32,
    processes=24,
    output_bytes=1 << 20,
    scratch_bytes=8 << 20,
)


@dataclass(frozen=True)
class Host:
    """The parts of the host that a hostile program could harm.

    Attributes:
        canary: A process.
        server: Listens.
        folder: Writable for this user.
        mark: A name that nothing has yet.
    """

    canary: subprocess.Popen[bytes]
    server: socket.socket
    folder: Path
    mark: str

    def program(self, text: str) -> str:
        """A program with the host's facts."""
        facts = {
            "HOME": str(Path.home()),
            "HOST": str(self.folder),
            "REPOSITORY": str(Path(__file__).resolve().parents[2]),
            "PORT": str(self.server.getsockname()[1]),
            "PARENT": str(os.getpid()),
            "CANARY": str(self.canary.pid),
            "MARK": self.mark,
        }
        for word, fact in facts.items():
            text = text.replace(word, fact)
        return text

    def harm(self) -> list[str]:
        done = []
        if self.canary.poll() is not None:
            done.append("the canary was killed")
        self.server.setblocking(False)
        try:
            self.server.accept()
            done.append("somebody connected")
        except BlockingIOError:
            pass
        done += [f"{folder} was written to" for folder in (self.folder, Path.home()) if (folder / self.mark).exists()]
        return done + (["a process survived"] if running(self.mark) else [])


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host to attack."""
    canary = subprocess.Popen(["sleep", "600"])
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield Host(canary, server, tmp_path, f"mark-{secrets.token_hex(8)}")
    canary.kill()
    canary.wait()


def secret_task(call: str = "answer(7)") -> Task:
    """A task that only who reads its tests can solve."""
    expected = f"expected-{secrets.token_hex(16)}"
    return Task("secret", "python", "", "", (f"assert {call} == {expected!r}", f"assert {expected!r} == {call}"))


NOTICING = Task("noticing", "python", "", "", ("assert len(answer()) > 1000",))
"""A task whose result has a hash of all that `leaving.NOTICES` sees."""


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_program_passes_or_escapes(any_sandbox: Sandbox, name: str, host: Host) -> None:
    attack(any_sandbox, name, host)


@pytest.mark.parametrize("name", DEPEND_ON_THE_SANDBOX)
def test_every_back_end_withstands(sandbox: Sandbox, any_sandbox: Sandbox, name: str, host: Host) -> None:
    if sandbox == any_sandbox:
        pytest.skip("tested with all programs")
    attack(sandbox, name, host)


@pytest.mark.parametrize(
    "name", sorted(set(DEPEND_ON_THE_SANDBOX) - {"leave-keys"})
)  # see "Bounds" of docs/sandbox.md
def test_a_new_interpreter_for_each_withstands(any_sandbox: Sandbox, name: str, host: Host) -> None:
    attack(replace(any_sandbox, may_fork=False), name, host)


def attack(sandbox: Sandbox, name: str, host: Host) -> None:
    """Check a hostile program, and an ordinary one before and after it."""
    program, statuses = PROGRAMS[name]
    limits = replace(LIMITS, cpu_seconds=10)  # which none comes to that ends by itself, on however busy a machine
    if "timeout" in statuses:  # of answers that collide, CPU time decides
        limits = LIMITS if name == "answers-that-collide" else replace(LIMITS, wall_seconds=5)
    with PythonRunner(sandbox, limits) as runner:
        before = runner.check(NOTICING, leaving.NOTICES)
        result = runner.check(secret_task(), host.program(program))
        after = runner.check(NOTICING, leaving.NOTICES)
    assert result.status in statuses, result
    assert (before.status, before.outputs != "") == ("pass", True), before
    assert (after, after.outputs) == (before, before.outputs)
    assert host.harm() == []


def test_the_search_finds_what_is_in_reach(any_sandbox: Sandbox, host: Host) -> None:
    task = secret_task()
    expected = task.tests[0].split("'")[1]
    given = Task("given", "python", "", "", (f"assert answer({expected!r}) == {expected!r}",))
    with PythonRunner(any_sandbox, LIMITS) as runner:
        assert runner.check(given, host.program(SEARCH_FOR_TESTS)).status == "pass"


def test_the_run_goes_on(any_sandbox: Sandbox, host: Host) -> None:
    tasks = {"secret": secret_task(), "double": Task("double", "python", "", "", ("assert double(4) == 8",))}
    right = "def double(x): return 2 * x"
    names = ["fork-bomb", "os-exit-0", "kill-the-parent", "memory-filler", "always-equal-object", "survive"]
    samples = []
    for index, name in enumerate(names):
        samples += [Sample("secret", index, host.program(PROGRAMS[name][0])), Sample("double", index, right)]
        right += "\n"  # equal programs would run once
    verdicts = score(tasks, samples, sandbox=any_sandbox, limits=LIMITS, workers=2, progress=False)
    assert [one.passed for one in verdicts] == [False, True] * len(names), verdicts
    assert not [one for one in verdicts if one.status == "sandbox_error"]
    assert host.harm() == []
