"""The choice of a back end and its proof; limits and ends of sandboxed processes."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from hf_fastdecode.evals import sandbox as sandboxes
from hf_fastdecode.evals.sandbox import (
    BACKENDS,
    LimitExceeded,
    Limits,
    Sandbox,
    SandboxedProcess,
    SandboxError,
    backends,
    choose,
    python_command,
)
from hf_fastdecode.evals.sandbox import process as first_processes
from hf_fastdecode.evals.sandbox.launch import Unconfined, memory_is_exhausted, usage_of, view_of

from .processes import LIMITS, Edited, Outcome, outcome, running

RunPython = Callable[..., Outcome]


@pytest.fixture
def unshare() -> None:
    if refusal := sandboxes._refusal("unshare"):
        pytest.skip(refusal)


@pytest.fixture
def refusals(monkeypatch: pytest.MonkeyPatch) -> dict[str, str | None]:
    """Reasons to refuse each back end, in place of the proof; all pass."""
    found: dict[str, str | None] = dict.fromkeys(BACKENDS)
    monkeypatch.setattr(sandboxes, "_refusal", found.__getitem__)
    return found


def test_auto_takes_the_first_that_passes_the_proof(refusals: dict[str, str | None]) -> None:
    assert choose().name == "bwrap"
    refusals["bwrap"] = "not installed"
    assert choose().name == "unshare"
    refusals["unshare"] = refusals["podman"] = "it reaches the network"
    assert choose().name == "docker"


def test_auto_never_falls_back_to_none(refusals: dict[str, str | None]) -> None:
    refusals.update(dict.fromkeys(BACKENDS, "it reaches the network"))
    with pytest.raises(SandboxError, match=r"bwrap: it reaches the network.*apt install bubblewrap") as error:
        choose(allow_unsafe=True)
    assert "\n" not in str(error.value)
    assert "none" not in str(error.value)


def test_the_refusal_names_what_denies_user_namespaces(
    refusals: dict[str, str | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Ubuntu 24.04 does by default: there, bubblewrap helps only once that is changed."""
    monkeypatch.setattr(sandboxes, "_SETTINGS", tmp_path)
    refusals.update(dict.fromkeys(BACKENDS, "Permission denied"))
    with pytest.raises(SandboxError, match=r"; install bubblewrap \(apt install bubblewrap\), or inside a container"):
        choose()
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel" / "apparmor_restrict_unprivileged_userns").write_text("1\n")
    denied = r"denies the user namespaces .*kernel\.apparmor_restrict_unprivileged_userns is 1\): .*docker or podman"
    with pytest.raises(SandboxError, match=denied):
        choose()
    with pytest.raises(SandboxError, match=r"\(podman: Permission denied\); install bubblewrap"):
        choose("podman")


def test_a_named_back_end_is_used_or_refused(refusals: dict[str, str | None]) -> None:
    assert choose("podman").name == "podman"
    refusals["podman"] = "the limit on processes does not bind"
    with pytest.raises(SandboxError, match="podman: the limit on processes does not bind") as error:
        choose("podman")
    assert "bwrap:" not in str(error.value)
    with pytest.raises(ValueError, match="must be auto, bwrap, unshare, podman, docker, none, got 'chroot'"):
        choose("chroot")


def test_none_has_to_be_allowed() -> None:
    with pytest.raises(SandboxError, match="`allow_unsafe=True`"):
        choose("none")
    assert choose("none", allow_unsafe=True).name == "none"


def test_the_proof_is_made_once(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandboxes, "prove", None)
    assert choose(sandbox.name) == sandbox


def test_without_isolation_the_proof_tells_each_escape() -> None:
    refusal = sandboxes.prove(Unconfined())
    assert refusal is not None
    expected = ["network", "temporary folder", "outside its folder", "more than its size", "processes of the host"]
    expected += ["keeps root or capabilities", "makes user namespaces"] if os.geteuid() == 0 else []
    expected += ["limit on processes"]
    assert [part for part in expected if part not in refusal] == []


@pytest.mark.parametrize(
    ("edits", "escape"),
    [
        ([("--net", "")], "it reaches the network"),
        ([("mount -o remount,bind,ro tmpfs /", "true")], "it writes outside its folder"),
        ([("size=1048576", "size=8m")], "its folder takes more than its size"),
        ([("--no-new-privs", "")], "it keeps root or capabilities"),
        ([("echo 1 > /proc/sys/user/max_user_namespaces", "true")], "it makes user namespaces"),
        ([("--nproc=16:16", "--nproc=64:64")], "the limit on processes does not bind"),
        ([("--data=1073741824:1073741824", "--data=4294967296:4294967296")], "the limit on memory does not bind"),
    ],
)
@pytest.mark.usefixtures("unshare")
def test_each_hole_is_seen_alone(edits: list[tuple[str, str]], escape: str) -> None:
    assert sandboxes.prove(Edited(edits=tuple(edits))) == escape


@pytest.mark.usefixtures("unshare")
def test_a_back_end_that_does_not_start_is_refused() -> None:
    absent = str(sandboxes.prove(Edited(edits=(("setpriv", "no-such-program"),))))
    assert "no-such-program cannot be started" in absent or "no-such-program: not found" in absent
    assert "mount: /tmp/hf-fastdecode-" in str(
        sandboxes.prove(Edited(edits=(("mount -t proc", "mount -t nosuchfs"),)))
    )


def test_a_mount_point_of_another_user_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "Path", lambda path: tmp_path / Path(path).name)
    point = backends.mount_point.__wrapped__("root")
    assert point.stat().st_mode & 0o777 == 0o755
    point.rmdir()
    point.symlink_to("/etc")
    with pytest.raises(SandboxError, match="is no folder of user"):
        backends.mount_point.__wrapped__("root")


@pytest.mark.parametrize("path", [Path("relative"), Path("/nosuch"), Path("/"), Path("/proc"), Path.home()])
def test_what_may_not_be_shown(path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(str(path))):
        view_of((path,))


def test_packages_are_hidden_unless_asked_for(tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    package = packages / "package"
    package.mkdir(parents=True)
    view = view_of((tmp_path / "lib",))
    assert tmp_path / "lib" in view.readable
    assert packages in view.hidden
    assert package not in view.readable
    with_package = view_of((tmp_path / "lib", package))
    assert {tmp_path / "lib", package} <= set(with_package.readable)


LITTLE_CPU = replace(LIMITS, cpu_seconds=0.5)


ECHO = "import sys\nfor line in sys.stdin: print(line.upper(), end='', flush=True)"
SLEEP = "import time; time.sleep(9)"


def run(
    sandbox: Sandbox, source: str, limits: Limits = LIMITS, stdin: bytes = b"", shown: Sequence[Path] = ()
) -> Outcome:
    command, readable = python_command()
    shown = [*readable, *shown]
    return outcome(lambda: sandbox.popen([*command, "-c", source], readable=shown, limits=limits), stdin)


def started(sandbox: Sandbox, source: str, limits: Limits = LIMITS) -> SandboxedProcess:
    command, readable = python_command()
    return sandbox.popen([*command, "-c", source], readable=readable, limits=limits)


def test_output(sandbox: Sandbox) -> None:
    done = run(sandbox, "import sys; print(sys.stdin.read()[::-1]); print('aside', file=sys.stderr)", stdin=b"abc")
    assert (done.status, done.exit_code, done.stdout, done.stderr, done.detail) == ("ok", 0, b"cba\n", b"aside\n", "")


def test_exit_codes(run_python: RunPython) -> None:
    for source, code, detail in (
        ("raise SystemExit(3)", 3, "ended with exit code 3"),
        ("import os; os.abort()", 134, "ended by signal 6"),
    ):
        done = run_python(source)
        assert (done.status, done.exit_code, done.detail) == ("failed", code, detail)


def test_a_program_sees_an_empty_folder_and_a_cleared_environment(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET", "value")
    source = "import os; print(os.getcwd(), os.listdir(), 'SECRET' in os.environ, os.getuid(), os.environ['HOME'])"
    assert run(sandbox, source).stdout == b"/tmp [] False 65534 /tmp\n"


def test_first_processes_may_have_ended_already(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    children_of = first_processes.children_of
    monkeypatch.setattr(first_processes, "children_of", lambda pid: [*children_of(pid), ended.pid])
    assert run(sandbox, "print(1)").stdout == b"1\n"


def test_paths_are_shown_where_they_are_and_cannot_be_changed(sandbox: Sandbox, tmp_path: Path) -> None:
    shown = tmp_path / "shown"
    shown.mkdir()
    (shown / "file").write_text("content")
    (tmp_path / "beside").write_text("hidden")
    source = f"""
print(open('{shown}/file').read())
try:
    open('{shown}/new', 'w')
except OSError as error:
    print(error.strerror)
"""
    done = run(sandbox, source, shown=[shown])
    assert done.stdout == b"content\nRead-only file system\n", done
    done = run(sandbox, f"open('{tmp_path}/beside')", shown=[shown])
    assert done.stderr.splitlines()[-1].startswith(b"FileNotFoundError")


def test_packages_are_seen_empty_but_for_those_asked_for(sandbox: Sandbox, tmp_path: Path) -> None:
    packages = tmp_path / "lib" / "python3.11" / "site-packages"
    for name in ("asked_for", "other"):
        (packages / name).mkdir(parents=True)
        (packages / name / "tests.py").write_text("secret")
    source = f"import os; print(os.listdir('{packages}'), os.listdir('{packages}/asked_for'))"
    done = run(sandbox, source, shown=[tmp_path / "lib", packages / "asked_for"])
    assert done.stdout == b"['asked_for'] ['tests.py']\n", done


SHARED = (
    "import mmap, time\nm = mmap.mmap(-1, 1 << 30)\nfor _ in range(400): m.write(b'x' * (1 << 20))\ntime.sleep(60)"
)
TOGETHER = "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(os.urandom(1)) * (100 << 20)\ntime.sleep(60)"


@pytest.mark.parametrize(
    ("source", "limits", "status", "detail"),
    [
        ("while True: pass", LITTLE_CPU, "timeout", "used more than 0.5 s of CPU time"),
        (
            "import os\nos.fork(); os.fork()\nwhile True: pass",
            LITTLE_CPU,
            "timeout",
            "used more than 0.5 s of CPU time",
        ),
        ("import time; time.sleep(60)", replace(LIMITS, wall_seconds=2), "timeout", "not done after "),
        ("while True: print('x' * 1000)", LIMITS, "output", "wrote more than 1,048,576 bytes"),
        ("import sys\nwhile True: sys.stderr.write('x' * 1000)", LIMITS, "output", "wrote more than 1,048,576 bytes"),
        (SHARED, LIMITS, "memory", "used more than 256 MiB of memory"),
        (TOGETHER, LIMITS, "memory", "used more than 256 MiB of memory"),
    ],
    ids=["cpu", "cpu-of-all-processes", "wall", "stdout", "stderr", "shared-memory", "memory-of-all-processes"],
)
def test_limits_kill(run_python: RunPython, source: str, limits: Limits, status: str, detail: str) -> None:
    done = run_python(source, limits)
    assert (done.status, done.exit_code) == (status, None), done
    assert done.detail.startswith(detail)
    assert run_python("print(1)").stdout == b"1\n"


def test_cpu_time_is_measured(run_python: RunPython) -> None:
    waiting = "import os, time\nif os.fork(): os.wait()\nelse:\n    while time.process_time() < 0.3: pass"
    done = run_python(waiting)
    assert done.status == "ok"
    assert 0.3 <= done.cpu_seconds < 3
    assert run_python("while True: pass", LITTLE_CPU).cpu_seconds > LITTLE_CPU.cpu_seconds


@pytest.mark.parametrize("ending", ["", "time.sleep(60)", "while True: pass"], ids=["itself", "wall", "cpu"])
def test_nothing_outlives_the_program(run_python: RunPython, ending: str) -> None:
    token = f"survivor-{os.getpid()}-{time.monotonic_ns()}"
    survivor = f"""
import os, signal, subprocess, sys, time
if os.fork() == 0:
    os.setsid()
    for number in range(1, 32):
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_IGN)
    if os.fork() == 0:
        subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(60)", "{token}"], close_fds=True)
        time.sleep(60)
    os._exit(0)
def runs(pid):
    try:
        return open(f"/proc/{{pid}}/cmdline").read().split("\\0")[-2] == "{token}"
    except (OSError, IndexError):
        return False
while not any(map(runs, filter(str.isdigit, os.listdir("/proc")))):
    time.sleep(0.01)
print("the survivor runs", flush=True)
{ending}
"""
    done = run_python(survivor, after_output=(0.5, 0.5))
    assert (done.status, done.stdout) == ("timeout" if ending else "ok", b"the survivor runs\n")
    assert not running(token)


class Clock:
    """The host's, which each look moves by `step` seconds."""

    sleep = staticmethod(time.sleep)

    def __init__(self) -> None:
        self.now = self.step = 0.0

    def monotonic(self) -> float:
        self.now += self.step
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Stands still where a test does not move it, however long a busy machine takes."""
    made = Clock()
    monkeypatch.setattr("hf_fastdecode.evals.sandbox.process.time", made)
    return made


def test_a_server_answers_and_gets_time_anew(any_sandbox: Sandbox, clock: Clock) -> None:
    with started(any_sandbox, ECHO, Limits(wall_seconds=0.6, output_bytes=8)) as server:
        for number in range(4):
            server.renew(10, 0.6)
            server.send(b"abc%d\n" % number)
            assert server.receive() == b"ABC%d\n" % number
            clock.now += 0.3
        assert usage_of(server.pid).resident_bytes > 0
        clock.step = 0.05
        with pytest.raises(LimitExceeded, match="not done after") as error:
            server.receive()
        assert (error.value.status, error.value.load) == ("timeout", False), "it slept by itself"
        server.kill()


def test_a_limit_that_the_kernel_enforces_first(run_python: RunPython) -> None:
    """As where the host gets no CPU to look at what its programs use."""
    done = run_python("import os, signal; os.kill(os.getpid(), signal.SIGXCPU)", LITTLE_CPU)
    assert (done.status, done.detail) == ("timeout", "used more than 0.5 s of CPU time")


def test_time_that_nobody_waits_for_it_does_not_count(any_sandbox: Sandbox, clock: Clock) -> None:
    with started(any_sandbox, ECHO, Limits(wall_seconds=0.6)) as process:
        for _ in range(2):
            clock.now += 0.8
            process.send(b"abc\n")
            assert process.receive() == b"ABC\n"
        clock.step = 0.05
        with pytest.raises(LimitExceeded, match="not done after 1 s"):
            process.receive()


def test_limits_on_a_server_are_those_of_its_request(any_sandbox: Sandbox) -> None:
    spin = "import sys, time\nfor line in sys.stdin:\n    until = time.process_time() + float(line)\n"
    spin += "    while time.process_time() < until: pass\n    print(flush=True)"
    with started(any_sandbox, spin, Limits(cpu_seconds=60)) as server:
        for _ in range(2):
            server.renew(0.8, 30)
            server.send(b"0.5\n")
            assert server.receive() == b"\n"
        server.renew(0.5, 30)
        server.send(b"9\n")
        with pytest.raises(LimitExceeded, match=r"used more than 0.5 s of CPU time"):
            server.receive()
    assert server.used_its_cpu_seconds


def test_a_starved_program_is_told_from_a_sleeping_one(any_sandbox: Sandbox) -> None:
    one_cpu, before = {min(os.sched_getaffinity(0))}, os.sched_getaffinity(0)
    os.sched_setaffinity(0, one_cpu)
    try:
        with ExitStack() as others:
            for _ in range(3):
                others.enter_context(started(any_sandbox, "while True: pass"))
            busy = started(any_sandbox, "while True: pass", Limits(cpu_seconds=60, wall_seconds=1))
            with busy, pytest.raises(LimitExceeded) as error:
                busy.receive()
            assert error.value.load
    finally:
        os.sched_setaffinity(0, before)


def test_a_machine_without_memory_ends_programs_that_may_not_be_to_blame(
    any_sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    with started(any_sandbox, SLEEP) as process:
        monkeypatch.setattr("hf_fastdecode.evals.sandbox.process.memory_is_exhausted", lambda: True)
        with pytest.raises(LimitExceeded, match="the machine ran out of memory") as error:
            process.receive()
    assert (error.value.status, error.value.load) == ("memory", True)


@pytest.mark.parametrize(("available", "exhausted"), [(2_000, False), (200, True)])
def test_exhausted_memory_is_noticed(monkeypatch: pytest.MonkeyPatch, available: int, exhausted: bool) -> None:
    text = f"MemTotal: 10000 kB\nMemFree: 100 kB\nMemAvailable: {available} kB\nHugePages_Total: 0\n"
    monkeypatch.setattr(Path, "read_text", lambda self: text)
    assert memory_is_exhausted() == exhausted


def test_writing_to_a_program_that_does_not_read(any_sandbox: Sandbox) -> None:
    deaf = started(any_sandbox, SLEEP, Limits(wall_seconds=1))
    with deaf, pytest.raises(LimitExceeded, match="not done after"):
        deaf.send(bytes(1 << 20))
    with started(any_sandbox, "pass") as gone:
        with pytest.raises(BrokenPipeError):
            gone.send(bytes(1 << 20))
        assert gone.wait() == 0


def test_large_input_and_output_do_not_block(sandbox: Sandbox) -> None:
    data = os.urandom(1 << 18) * 3
    done = run(sandbox, "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read())", stdin=data)
    assert done.stdout == data


def test_what_cannot_be_started() -> None:
    none = choose("none", allow_unsafe=True)
    done = outcome(lambda: none.popen(["/nosuch/program"]))
    assert (done.status, done.exit_code) == ("failed", 127)


def test_a_sandbox_that_is_not_set_up(monkeypatch: pytest.MonkeyPatch, any_sandbox: Sandbox) -> None:
    if any_sandbox.name != "bwrap":
        pytest.skip("an option of bwrap")
    monkeypatch.setattr("hf_fastdecode.evals.sandbox.backends._BWRAP", ["--no-such-option"])
    done = outcome(lambda: any_sandbox.popen(["true"]))
    assert (done.status, done.detail) == ("sandbox_error", "bwrap: Unknown option --no-such-option")
    with pytest.raises(SandboxError, match="Unknown option"):
        any_sandbox.popen(["true"])
