"""Checks Java programs: a new process for each, and one that compiles them all and runs their tests."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import Final, Self

from ...records import Status
from ...sandbox import LimitExceeded, Limits, Sandbox, SandboxedProcess, SandboxError
from ...task import Task
from ..messages import BrokenMessageError, Peer, how_it_ended, judged, one_line
from .stand_in import StandIn

_FOLDER: Final = Path(__file__).resolve().parent
# A program runs for milliseconds, so that starting counts: one collector thread, the quick compiler, shared classes.
_OPTIONS: Final = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto", "-Xmx512m")
_SERVER_SECONDS: Final = 60.0  # more than a program may take
_COMPILE_SECONDS: Final = 100.0  # as MBXP's own evaluation allows
_BUILDING: Final = Lock()


def missing_jdk() -> str | None:
    """Why Java cannot be checked here, with the remedy; None where it can."""
    absent = [name for name in ("java", "javac") if shutil.which(name) is None]
    if not absent:
        return None
    return f"Java programs need {' and '.join(absent)}; install a JDK of version 11 or later (apt install default-jdk)"


class JavaRunner:
    """Checks programs one after another. To be used by the thread that made it, as a context manager.

    Args:
        sandbox: Where programs, the compiler and tests run, each program in one of its own.
        limits: Of each program.

    Raises:
        SandboxError: There is no JDK.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits | None = None):
        if missing := missing_jdk():
            raise SandboxError(missing)
        self._sandbox = sandbox
        self._limits = limits or Limits()
        self._home = Path(shutil.which("java") or "").resolve().parents[1]
        self._server: Peer | None = None

    def check(self, task: Task, completion: str) -> tuple[Status, str]:
        """The outcome of a completion's tests, and a line about it.

        Args:
            task: In Java; its stem ends with the signature of a static method.
            completion: What continues it.

        Raises:
            SandboxError: A process could not be started, or the one of the tests broke down; this says nothing about
                the completion.
        """
        stand_in = StandIn.of_stem(task.stem)
        tests = "\n".join(task.tests)
        compiled = self._compiled(f"{task.program(completion)}\n{tests}")
        if isinstance(compiled, str):
            return "compile", compiled
        server = self._running_server()
        with self._start("Candidate", self._limits) as process:
            candidate = Peer(process)
            if outcome := _loaded(candidate, stand_in, compiled):
                return outcome
            try:
                return judged(server, candidate, "test", stand_in.source + tests)
            except SandboxError:
                self.close()
                raise

    def close(self) -> None:
        """End the process of compiler and tests; the next check starts another."""
        if self._server is not None:
            self._server.process.kill()
        self._server = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _compiled(self, source: str) -> list[bytes] | str:
        """Names and contents of a program's classes in turn, or the compiler's message.

        A program that the compiler breaks down on twice, the second time anew, is one that does not compile.
        """
        for last in (False, True):
            server = self._running_server()
            server.process.renew(_COMPILE_SECONDS)
            try:
                server.send("compile", source)
                kind, *parts = server.receive()
            except (EOFError, BrokenPipeError, BrokenMessageError, LimitExceeded) as error:
                self.close()
                if last:
                    return one_line(f"the compiler breaks down: {error or 'it ended'}".encode())
            else:
                return parts if kind == b"classes" else one_line(parts[0])
        raise AssertionError("the second time returns")

    def _running_server(self) -> Peer:
        seconds = self._limits.wall_seconds + _SERVER_SECONDS
        if self._server is None:
            self._server = Peer(self._start("Server", replace(self._limits, cpu_seconds=1e6, wall_seconds=seconds)))
        self._server.process.renew(seconds)
        return self._server

    def _start(self, name: str, limits: Limits) -> SandboxedProcess:
        classes = _built()
        command = [str(self._home / "bin" / "java"), *_OPTIONS, "-cp", str(classes), f"evals.{name}"]
        return self._sandbox.popen(command, readable=[classes, *_parts(self._home)], limits=limits)


def _loaded(candidate: Peer, stand_in: StandIn, classes: list[bytes]) -> tuple[Status, str] | None:
    """Have the program loaded; the outcome where it cannot be."""
    try:
        candidate.send(stand_in.holder, stand_in.name, ",".join(stand_in.types), *classes)
        kind, *texts = candidate.receive()
    except LimitExceeded as error:
        return error.status, error.detail
    except BrokenMessageError as error:
        return "output", str(error)
    except (EOFError, BrokenPipeError):
        return how_it_ended(candidate.process)
    if kind == b"ready":
        return None
    return ("memory" if kind == b"memory" else "fail"), one_line(b" ".join(texts))


def _built() -> Path:
    """A folder with the classes of this package, compiled once per process."""
    with _BUILDING:
        return _compile_sources()


@cache
def _compile_sources() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hf-fastdecode-java-")).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)
    sources = [str(path) for path in sorted(_FOLDER.glob("*.java"))]
    done = subprocess.run(
        ["javac", "-nowarn", "-d", str(folder), *sources], capture_output=True, text=True, check=False, timeout=300
    )
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise SandboxError(f"javac does not compile the checker: {said[0]}; install a JDK of version 11 or later")
    return folder


@cache
def _parts(home: Path) -> list[Path]:
    """A JDK's folder, and what its links lead to outside, such as Debian's settings in `/etc`."""
    targets = {path.resolve() for path in home.rglob("*") if path.is_symlink()}
    return [home, *sorted(target for target in targets if target.exists() and not target.is_relative_to(home))]
