"""Checks Java programs with a JDK."""

from __future__ import annotations

import atexit
import shutil
import subprocess
import tempfile
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Final

from ...records import Task
from ...sandbox import LimitExceeded, Limits, SandboxError
from ..messages import one_line
from ..pairs import PairRunner, Role
from ..runner import LanguageSupport, Result, command_version, require_tests
from .stand_in import StandIn

_FOLDER: Final = Path(__file__).resolve().parent
_CLASSES: Final = {"server": "evals.Server", "candidate": "evals.Candidate"}
# A program runs for milliseconds, so that starting counts: one collector thread, the quick compiler, shared classes.
_OPTIONS: Final = (
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto", "-Xmx512m"),
    "-XX:+DisplayVMOutputToStderr",  # standard output is for messages
)
_COMPILE_SECONDS: Final = 100.0  # as MBXP's own evaluation allows; of CPU time, as all limits here
_BUILD_SECONDS: Final = 300.0
_REMEDY: Final = "install a JDK of version 11 or later (apt install default-jdk)"
_BUILDING: Final = Lock()


class JavaRunner(PairRunner):
    """Compiles programs together with their tests, as MBXP does, and runs each in a new process without its tests."""

    def _check(self, task: Task, completion: str) -> Result:
        """Of a task whose stem ends with the signature of a static method; another raises ValueError."""
        stand_in = _stand_in(task)
        tests = "\n".join(task.tests)
        compiled = self._compiled(f"{task.program(completion)}\n{tests}")
        if isinstance(compiled, Result):
            return compiled
        program: list[bytes | str] = [stand_in.holder, stand_in.name, ",".join(stand_in.types), *compiled]
        return self._tested(program, ["test", stand_in.source + tests])

    def _compiled(self, source: str) -> list[bytes] | Result:
        """Names and contents of a program's classes in turn; or the result where there are none."""
        server = self._running_server(_COMPILE_SECONDS, _COMPILE_SECONDS + self._limits.wall_seconds)
        try:
            server.send("compile", source)
            kind, *parts = server.receive()
        except (EOFError, BrokenPipeError, LimitExceeded) as error:
            return self._server_failed(server, error, "the compiler")
        if kind == b"memory":
            return self._attributed(Result("memory", one_line(parts[0])))
        return parts if kind == b"classes" else Result("compile", one_line(parts[0]))

    def _launch(self, role: Role) -> tuple[list[str], list[Path]]:
        classes = _built()
        home = Path(shutil.which("java") or "").resolve().parents[1]
        command = [str(home / "bin" / "java"), *_OPTIONS, "-cp", str(classes), _CLASSES[role]]
        return command, [classes, *_parts(home)]


def _missing() -> str | None:
    absent = [name for name in ("java", "javac") if shutil.which(name) is None]
    return f"Java programs need {' and '.join(absent)}; {_REMEDY}" if absent else None


def _built() -> Path:
    """A folder with the classes of this package, compiled once per process."""
    with _BUILDING:
        return _compile_sources()


@cache
def _compile_sources() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="hf-fastdecode-java-")).resolve()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    folder.chmod(0o755)  # others run there than this user
    sources = [str(path) for path in sorted(_FOLDER.glob("*.java"))]
    command = ["javac", "-nowarn", "-d", str(folder), *sources]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_BUILD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise SandboxError(f"javac has not compiled the checker after {_BUILD_SECONDS:g} s; try again") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines() or [f"exit code {done.returncode}"]
        raise SandboxError(f"javac does not compile the checker: {said[0]}; {_REMEDY}")
    return folder


@cache
def _parts(home: Path) -> list[Path]:
    """A JDK's folder, and what its links lead to outside, such as Debian's settings in `/etc`."""
    targets = {path.resolve() for path in home.rglob("*") if path.is_symlink()}
    return [home, *sorted(target for target in targets if target.exists() and not target.is_relative_to(home))]


def _stand_in(task: Task) -> StandIn:
    require_tests(task)
    return StandIn.of_stem(task.stem)


JAVA: Final = LanguageSupport(JavaRunner, Limits(), _missing, _stand_in, partial(command_version, "java"))
