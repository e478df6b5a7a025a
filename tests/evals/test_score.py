"""Scoring samples, and the two processes that a check has."""

from __future__ import annotations

import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.sandbox import Limits, Sandbox, SandboxError, choose, python_command
from hf_fastdecode.evals.scoring import LANGUAGES, LanguageSupport, Result, score
from hf_fastdecode.evals.scoring.python import PythonRunner, job_of
from hf_fastdecode.evals.scoring.runner import BrokenServerError, Role, Runner, command_version

from ..cases import exhaustive_but
from .example_tasks import Scripted
from .processes import running

TASKS = {name: Task(name, "python", "", "", ("assert f() == 1",)) for name in ("a", "b")}
NONE = choose("none", allow_unsafe=True)


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Result | Exception]]:
    """The answers of the runner."""
    Scripted.scripts, Scripted.seen, Scripted.walls = {}, [], []
    support = LanguageSupport(runner=Scripted, limits=Limits(wall_seconds=3), check_task=job_of)
    monkeypatch.setitem(LANGUAGES, "python", support)
    return Scripted.scripts


def test_verdicts_are_in_the_order_of_samples(any_sandbox: Sandbox) -> None:
    texts = ["def f(): return 1", "def f(): return 2", "def f(", "def f(): return 1"]
    samples = [Sample(task, index, text) for task in "ba" for index, text in enumerate(texts)]
    verdicts = score(TASKS, samples, sandbox=any_sandbox, workers=2, progress=False)
    assert [(one.task_id, one.index) for one in verdicts] == [(one.task_id, one.index) for one in samples]
    assert [one.status for one in verdicts] == ["pass", "fail", "compile", "pass"] * 2
    assert score(TASKS, [], sandbox=any_sandbox, progress=False) == []


def test_equal_programs_of_a_task_run_once(scripts: dict[str, list[Result | Exception]]) -> None:
    samples = [Sample(task, index, text) for task in "ab" for index, text in enumerate("xyxx")]
    score(TASKS, samples, sandbox=NONE, progress=False)
    assert Counter(text for _, text in Scripted.seen) == {"x": 2, "y": 2}


def test_what_a_busy_machine_may_have_caused_runs_again_alone(scripts: dict[str, list[Result | Exception]]) -> None:
    scripts |= {
        "slow": [Result("timeout", "at first", load=True), Result("pass")],
        "slower": [Result("timeout", "at first", load=True), Result("timeout", "then", load=True)],
        "endless": [Result("timeout", "by CPU time")],
        "broken once": [SandboxError("no sandbox"), Result("fail", "wrong")],
        "broken": [SandboxError("no sandbox")],
    }
    samples = [Sample("a", index, text) for index, text in enumerate([*scripts, "quick"])]
    verdicts = score(TASKS, samples, sandbox=NONE, workers=3, progress=False)
    assert [(one.status, one.detail) for one in verdicts] == [
        ("pass", ""),
        ("timeout", "then"),
        ("timeout", "by CPU time"),
        ("fail", "wrong"),
        ("sandbox_error", "no sandbox"),
        ("pass", ""),
    ]
    first = len(samples)
    assert ({*Scripted.walls[:first]}, {*Scripted.walls[first:]}) == ({3}, {12})
    assert [text for _, text in Scripted.seen[first:]] == ["slow", "slower", "broken once", "broken", "broken"]


def test_what_breaks_the_tests_counts_where_they_are_known_to_work(
    scripts: dict[str, list[Result | Exception]],
) -> None:
    by_itself, by_load = Result("memory", "too much"), Result("timeout", "waited", load=True)
    scripts |= {
        "bad": [BrokenServerError(by_itself)],
        "starved": [BrokenServerError(by_load)],
        "wrong": [Result("fail")],
    }
    scripts["bad once"] = [BrokenServerError(by_itself), Result("pass")]
    for reference, beside, expected in (
        (None, "right", ["memory", "timeout"]),
        (None, "wrong", ["memory", "sandbox_error"]),
        ("right", "wrong", ["memory", "timeout"]),
        ("wrong", "wrong", ["memory", "sandbox_error"]),
        ("bad", "wrong", ["sandbox_error", "sandbox_error"]),
    ):
        tasks = {"a": replace(TASKS["a"], reference=reference)}
        samples = [Sample("a", index, text) for index, text in enumerate(["bad", "starved", beside])]
        verdicts = score(tasks, samples, sandbox=NONE, progress=False)
        assert [one.status for one in verdicts[:2]] == expected, (reference, beside)
    assert score(TASKS, [Sample("a", 0, "bad once")], sandbox=NONE, progress=False)[0].passed


def test_given_limits_replace_those_of_the_language(scripts: dict[str, list[Result | Exception]]) -> None:
    score(TASKS, [Sample("a", 0, "x")], sandbox=NONE, limits=Limits(wall_seconds=7), progress=False)
    assert Scripted.walls == [7]


def test_an_error_ends_the_run(scripts: dict[str, list[Result | Exception]]) -> None:
    scripts["bad"] = [ValueError("the tests of task a are not valid Python")]
    samples = [Sample("a", index, text) for index, text in enumerate(["bad", *map(str, range(100))])]
    with pytest.raises(ValueError, match="tests of task a"):
        score(TASKS, samples, sandbox=NONE, workers=2, progress=False)
    assert len(Scripted.seen) < 100


def test_ctrl_c_ends_the_run_at_once_and_leaves_nothing(any_sandbox: Sandbox) -> None:
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    source = f"""
import signal
from hf_fastdecode.evals.records import Sample, Task
from hf_fastdecode.evals.sandbox import Limits, choose
from hf_fastdecode.evals.scoring import score
signal.signal(signal.SIGINT, signal.default_int_handler)  # a run in the background ignores it
texts = [f"import os\\nos.execv('/bin/sleep', ['{mark}', '{{seconds}}'])" for seconds in (600, 601, 602, 603)]
samples = [Sample("a", index, text) for index, text in enumerate(texts)]
options = {{"sandbox": choose({any_sandbox.name!r}), "limits": Limits(wall_seconds=600), "workers": 2}}
print("ready", flush=True)
score({{"a": Task("a", "python", "", "", ("assert f()",))}}, samples, **options, progress=False)
"""
    process = subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        while not running(mark):
            assert process.poll() is None
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        assert b"KeyboardInterrupt" in process.communicate(timeout=60)[1]
    until = time.monotonic() + 60
    while running(mark):
        assert time.monotonic() < until, "a sandbox outlived its host"
        time.sleep(0.05)


def test_tasks_are_checked_before_anything_runs(scripts: dict[str, list[Result | Exception]]) -> None:
    tasks = {**TASKS, "empty": Task("empty", "python", "", "", ())}
    samples = [Sample("a", 0, "x"), Sample("empty", 0, "y")]
    with pytest.raises(ValueError, match="task empty has no tests; every program would pass"):
        score(tasks, samples, sandbox=NONE, progress=False)
    assert Scripted.seen == []


def test_scoring_does_not_import_torch() -> None:
    code = "import sys, hf_fastdecode.evals.scoring; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_unknown_tasks_and_missing_toolchains(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="1 samples' tasks are unknown, such as 'c'"):
        score(TASKS, [Sample("a", 0, ""), Sample("c", 0, "")], sandbox=NONE, progress=False)
    support = LanguageSupport(runner=Scripted, limits=Limits(), missing=lambda: "needs a compiler; apt install one")
    monkeypatch.setitem(LANGUAGES, "python", support)
    with pytest.raises(SandboxError, match="needs a compiler; apt install one"):
        score(TASKS, [Sample("a", 0, "")], sandbox=NONE, progress=False)


def test_versions_of_languages() -> None:
    assert LANGUAGES["python"].version() == platform.python_version()
    for language, command in (("javascript", "node"), ("java", "java")):
        version = LANGUAGES[language].version()
        assert bool(version) == bool(shutil.which(command))
        assert "\n" not in version
    assert command_version("no-such-command") == ""


LIMITS = Limits(cpu_seconds=0.5, wall_seconds=30)
ECHO_TASK = Task("1", "python", "", "", ("right",))

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


class EchoRunner(Runner):
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
        assert runner.check(ECHO_TASK, "right") == Result("pass")
        assert runner.check(ECHO_TASK, "other") == Result("fail", "wrong")
        for other in ("replay", "without"):
            with pytest.raises(SandboxError, match="wrong nonce"):
                runner.check(ECHO_TASK, other)


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
    result = runner.check(ECHO_TASK, value)
    assert (result.status, result.detail) == (status, detail)
    assert runner.check(ECHO_TASK, "right") == Result("pass")
    with pytest.raises(BrokenServerError) as error:  # it has judged another program before
        runner.check(ECHO_TASK, value)
    assert error.value.result.status == status
    assert runner.check(ECHO_TASK, "right") == Result("pass")


@pytest.mark.parametrize(("value", "code", "load"), [("exit", 3, False), ("kill", 137, True)])
def test_an_end_of_the_tests_process_is_never_certain(runner: EchoRunner, value: str, code: int, load: bool) -> None:
    with pytest.raises(BrokenServerError, match=f"the tests ended with exit code {code}") as error:
        runner.check(ECHO_TASK, value)
    assert (error.value.result.status, error.value.result.load) == ("fail", load)
    assert runner.check(ECHO_TASK, "right") == Result("pass")


def test_no_program_leaves_its_pool(any_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LANGUAGES, "python", LanguageSupport(EchoRunner, LIMITS))
    values = ["right", "exit", "kill", "spin", "wrong"]
    samples = [Sample("1", index, value) for index, value in enumerate(values)]
    verdicts = score({"1": ECHO_TASK}, samples, sandbox=any_sandbox, workers=1, progress=False)
    assert [one.status for one in verdicts] == ["pass", "fail", "fail", "timeout", "fail"]
    (alone,) = score({"1": ECHO_TASK}, [Sample("1", 0, "kill")], sandbox=any_sandbox, workers=1, progress=False)
    assert alone.status == "sandbox_error", "no program shows that the tests work"


def test_a_process_that_does_not_start_says_nothing_about_the_program(
    any_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    for role in ("server", "candidate"):
        with monkeypatch.context() as patched, EchoRunner(any_sandbox, LIMITS) as runner:
            patched.setitem(_SCRIPTS, role, "import sys; sys.exit('no memory')")
            with pytest.raises(SandboxError, match="does not start: no memory"):
                runner.check(ECHO_TASK, "right")


FORK_LIMITS = Limits(
    cpu_seconds=2, wall_seconds=20, memory_bytes=256 << 20, address_bytes=1 << 30, output_bytes=1 << 20
)
TASK = Task("1", "python", "", "", ("result = f()", "assert result is not None"))

PROGRAMS = """
import sys
def f():
    frame, frames = sys._getframe(), 0
    while frame:
        frame, frames = frame.f_back, frames + 1
    return frames
---
def f(depth=0):
    try:
        return f(depth + 1)
    except RecursionError:
        return depth
---
f = lambda: sorted(globals())
---
import sys
f = lambda: [sys.argv, sys.path, str(sys.flags), __name__, sys.getrecursionlimit(), sys.gettrace() is None]
---
import collections
f = lambda: collections.abc.Mapping.__name__
---
import collections, typing
f = lambda: collections.abc.Mapping.__name__
---
import importlib
f = lambda: importlib.util.find_spec("os").name
---
import xml
f = lambda: xml.etree.__name__
---
import concurrent
f = lambda: concurrent.futures.__name__
---
f = lambda: math.pi
---
import os.path
f = lambda: [os.getpid() > 1, os.listdir("."), os.path.abspath("."), sorted(os.environ)]
---
f = lambda: [hash("text"), list({"one", "two", "three"}), list({b"x", 1.5, None, "y"})]
---
import random
random.seed(3)
f = lambda: [random.random(), random.choice("abc"), random.gauss(0, 1)]
---
import gc
f = lambda: [gc.isenabled(), gc.get_threshold(), gc.get_freeze_count()]
---
import warnings
f = lambda: [str(one) for one in warnings.filters]
---
import threading
f = lambda: [threading.current_thread().name, threading.active_count()]
---
import decimal
f = lambda: [decimal.getcontext().prec, decimal.Decimal(1) / 3]
---
import signal
f = lambda: [str(signal.getsignal(number)) for number in range(1, 65)]
---
import sys
print("x" * 9999)
f = lambda: [sys.stdin.read(), sys.stdin.encoding, sys.stdout.encoding, sys.stdout.line_buffering, sys.stderr.errors]
---
import resource
f = lambda: [resource.getrlimit(number) for number in range(16)]
---
import os
f = lambda: [sorted(os.listdir("/proc/self/fd")), os.getsid(0) == os.getpid(), os.umask(7)]
---
import datetime, json, re
f = lambda: [json.dumps(str(datetime.date(2020, 1, 1))), re.findall("a+", "aaba")]
---
import subprocess, sys
f = lambda: subprocess.run([sys.executable, "-c", "print(6)"], capture_output=True).stdout
---
import atexit, os
atexit.register(lambda: open("/tmp/end", "w"))
def f():
    if os.fork() == 0:
        raise SystemExit
    os.wait()
    return os.listdir("/tmp")
---
import time
f = lambda: time.process_time() < 1
---
import dataclasses, typing
@dataclasses.dataclass
class Pair:
    left: int
    right: typing.Optional[int] = None
f = lambda: str(Pair(1))
""".split("---")


@pytest.fixture(scope="module")
def runners(any_sandbox: Sandbox) -> Iterator[tuple[PythonRunner, PythonRunner]]:
    """One that forks, as often as there are programs, and one that starts a new interpreter for each."""
    if not any_sandbox.forks:
        pytest.skip("it cannot fork here")
    with (
        PythonRunner(any_sandbox, FORK_LIMITS) as forked,
        PythonRunner(replace(any_sandbox, may_fork=False), FORK_LIMITS) as new,
    ):
        yield forked, new


@pytest.mark.parametrize("program", exhaustive_but(PROGRAMS[::3], PROGRAMS))
def test_outputs_are_those_of_a_new_interpreter(runners: tuple[PythonRunner, PythonRunner], program: str) -> None:
    forked, new = runners
    expected, found = new.check(TASK, program), forked.check(TASK, program)
    assert expected.outputs
    assert (found, found.outputs) == (expected, expected.outputs)
