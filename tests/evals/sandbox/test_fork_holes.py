"""Servers with one protection left out: the proof, or the next program, notices."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import pytest

from hf_fastdecode.evals.records import Task
from hf_fastdecode.evals.sandbox import (
    ForkServer,
    Sandbox,
    prove_forks,
    python_command,
)
from hf_fastdecode.evals.sandbox.backends import Unshare
from hf_fastdecode.evals.sandbox.launch import Launch, View
from hf_fastdecode.evals.scoring.python import PythonRunner

from .. import leaving
from .forking import ANY, LIMITS, output


@dataclass(frozen=True)
class Edited(Unshare):
    """The fork server of `unshare`, whose text was changed."""

    edits: tuple[tuple[str, str], ...] = ()

    def launch_fork_server(self, argv: list[str], view: View) -> Launch:
        launch = super().launch_fork_server(argv, view)
        command = list(launch.command)
        for old, new in self.edits:
            assert any(old in word for word in command) or list(argv) == list(python_command()[0]), old
            command = [word.replace(old, new) for word in command]
        return replace(launch, command=command)


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
