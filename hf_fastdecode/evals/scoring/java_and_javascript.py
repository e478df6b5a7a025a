"""Checking Java programs, which one process compiles and tests, and JavaScript programs by node, each in a sandbox.

`lodash.isequal` is lodash's `_.isEqual` as published on npm, with which MBXP's tests compare values.
"""

from __future__ import annotations

import atexit
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from threading import Lock
from typing import Final, Self

from ..records import Task
from ..sandbox import LimitExceeded, Limits, SandboxError
from .runner import LanguageSupport, Result, Role, Runner, command_version, one_line, require_tests

_JAVA_FOLDER: Final = Path(__file__).resolve().with_name("java")
_CLASSES: Final = {"server": "evals.Server", "candidate": "evals.Candidate"}
# A program runs for milliseconds, so that starting counts: one collector thread, the quick compiler, shared classes.
_OPTIONS: Final = (
    *("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Xshare:auto", "-Xmx512m"),
    "-XX:+DisplayVMOutputToStderr",  # standard output is for messages
)
_COMPILE_SECONDS: Final = 100.0  # as MBXP's evaluation allows; of CPU time, as all limits here
_BUILD_SECONDS: Final = 300.0
_REMEDY: Final = "install a JDK of version 11 or later (apt install default-jdk)"
_BUILDING: Final = Lock()


class JavaRunner(Runner):
    """Compiles programs together with their tests, as MBXP does, and runs each in a new process without its tests."""

    def _check(self, task: Task, completion: str) -> Result:
        forwarder = _forwarder(task)
        tests = "\n".join(task.tests)
        compiled = self._compiled(f"{task.program(completion)}\n{tests}")
        if isinstance(compiled, Result):
            return compiled
        program: list[bytes | str] = [forwarder.holder, forwarder.name, ",".join(forwarder.types), *compiled]
        return self._tested(program, ["test", forwarder.source + tests])

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


def _java_missing() -> str | None:
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
    sources = [str(path) for path in sorted(_JAVA_FOLDER.glob("*.java"))]
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
    """A JDK's folder, and the targets of its links outside, such as Debian's settings in `/etc`."""
    targets = {path.resolve() for path in home.rglob("*") if path.is_symlink()}
    return [home, *sorted(target for target in targets if target.exists() and not target.is_relative_to(home))]


def _forwarder(task: Task) -> Forwarder:
    require_tests(task)
    return Forwarder.of_stem(task.stem)


JAVA: Final = LanguageSupport(JavaRunner, Limits(), _java_missing, _forwarder, partial(command_version, "java"))


_SIGNATURE: Final = re.compile(
    r"\bclass\s+(?P<holder>\w+)[^{}]*\{(?:(?!\bclass\b).)*?"
    r"\bstatic\s+(?:<[^{}()]*>\s+)?(?P<type>[\w.<>,?\[\]\s]+?)\s+(?P<name>\w+)\s*\((?P<parameters>[^{}]*)\)"
    r"[^(){};]*\{\s*$",
    re.S,
)
_COMMENT: Final = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_BOXED: Final = {
    **{"int": "Integer", "long": "Long", "double": "Double", "float": "Float"},
    **{"short": "Short", "byte": "Byte", "char": "Character", "boolean": "Boolean"},
}


@dataclass(frozen=True)
class Forwarder:
    """The class that tests call instead of the program's: the static method of a stem, passing its arguments on."""

    holder: str  # the class
    name: str  # of the method
    types: tuple[str, ...]  # of its parameters, without type arguments
    source: str  # of the class with the method

    @classmethod
    def of_stem(cls, stem: str) -> Self:
        """Make it for the method that a stem leaves open, of which it has the signature up to the brace."""
        found = _SIGNATURE.search(_COMMENT.sub(" ", stem))
        if found is None:
            raise ValueError(f"a stem in Java must end with the signature of a static method, got {stem[-80:]!r}")
        parameters = [one.split() for one in _split(found["parameters"])]
        names = ", ".join(words[-1] for words in parameters)
        types = tuple(_erased(" ".join(words[:-1])) for words in parameters)
        boxed = _BOXED.get(found["type"], found["type"])
        body = f"return ({boxed}) evals.Server.call(new Object[] {{{names}}});"
        return cls(found["holder"], found["name"], types, f"{stem}{body}\n}}\n}}\n")


def _split(parameters: str) -> list[str]:
    parts, depth = [""], 0
    for letter in parameters:
        depth += (letter == "<") - (letter == ">")
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return [part for part in parts if part.strip()]


def _erased(declared: str) -> str:
    """A type's simple name: without annotations, `final`, package and type arguments."""
    plain = re.sub(r"<.*>", "", declared).split()[-1]
    return plain.rpartition(".")[2]


_JAVASCRIPT_FOLDER: Final = Path(__file__).resolve().with_name("javascript")
_SCRIPTS: Final = {"server": "judge.js", "candidate": "candidate.js"}
_HEAP_MIB: Final = 512
# Messages go over separate descriptors; standard input is empty, and what is printed is dropped with the errors.
_MOVE_STREAMS: Final = 'exec "$@" 3<&0 4>&1 0</dev/null 1>&2'


class JavaScriptRunner(Runner):
    """Checks programs as CommonJS modules, each in a new process."""

    def _check(self, task: Task, completion: str) -> Result:
        _check_task(task)
        return self._tested([task.program(completion), task.entry_point], ["\n".join(task.tests), task.entry_point])

    def _launch(self, role: Role) -> tuple[list[str], list[Path]]:
        node = Path(shutil.which("node") or "").resolve()
        command = [str(node), f"--max-old-space-size={_HEAP_MIB}", str(_JAVASCRIPT_FOLDER / _SCRIPTS[role])]
        return ["/bin/sh", "-c", _MOVE_STREAMS, "sh", *command], [node, _JAVASCRIPT_FOLDER]


def _check_task(task: Task) -> None:
    require_tests(task)
    if not task.entry_point.isidentifier():
        raise ValueError(f"task {task.task_id} must name the function under test, got {task.entry_point!r}")
    if not any(task.entry_point in test for test in task.tests):
        raise ValueError(f"the tests of task {task.task_id} never call {task.entry_point}; every program would pass")


JAVASCRIPT: Final = LanguageSupport(
    JavaScriptRunner,
    Limits(),
    lambda: None if shutil.which("node") else "JavaScript programs need node; install it (apt install nodejs)",
    _check_task,
    partial(command_version, "node"),
)
