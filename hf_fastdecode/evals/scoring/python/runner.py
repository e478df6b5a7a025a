"""The host's side of checking Python programs: starts both processes and hands their frames on."""

from __future__ import annotations

import marshal
import secrets
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from ...sandbox import LimitExceeded, Limits, Sandbox, SandboxedProcess, SandboxError, python_command
from ...task import Task
from ..runner import LanguageSupport, Result
from .frames import MAX_BYTES
from .job import job_of
from .plain import dumps, loads

_PACKAGE: Final = "hf_fastdecode_scoring"
_DETAIL: Final = 300  # letters

# Modules come compiled from the host, since the sandbox shows no folder of this package. What follows them on standard
# input is for `Frames`, so exactly their bytes are read.
_START: Final = f"""
import marshal, os, sys
def take(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit("no modules")
    return data
for name, code in marshal.loads(take(int.from_bytes(take(4), "little"))):
    module = sys.modules[name] = type(sys)(name)
    module.__package__ = {_PACKAGE!r}
    exec(code, module.__dict__)
module.main(sys.modules["{_PACKAGE}.frames"].Frames())
"""


class PythonRunner:
    """Checks Python programs, each in two new sandboxes: one for the program and one for the tests.

    Args:
        sandbox: Where both run.
        limits: Of each of the two.
    """

    def __init__(self, sandbox: Sandbox, limits: Limits):
        self._sandbox, self._limits = sandbox, limits

    def check(self, task: Task, completion: str) -> Result:
        """Run a completion's program, and if it defines something, the tests on it.

        Args:
            task: In Python.
            completion: What continues its stem.

        Raises:
            SandboxError: A sandbox could not be made, or the tests' process broke down.
            ValueError: The task has no tests, or none that are valid Python.
        """
        job = job_of(task)
        with self._start("candidate") as program:
            try:
                _send(program, task.program(completion).encode("utf-8", "surrogatepass"))
                kind, _, detail = _receive(program).decode(errors="replace").partition(" ")
            except LimitExceeded as error:
                return Result.exceeded(error)
            except (EOFError, BrokenPipeError):
                return _ended(program, "before the tests")
            if kind != "ready":
                return _not_ready(kind, detail)
            with self._start("referee", "remote") as tests:
                return _judge(job, tests, program)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def _start(self, *modules: str) -> SandboxedProcess:
        command, readable = python_command()
        process = self._sandbox.popen([*command, "-c", _START], readable=readable, limits=self._limits)
        try:
            process.send(_compiled("frames", "plain", *reversed(modules)))
        except (BrokenPipeError, LimitExceeded) as error:
            process.kill()
            raise SandboxError(f"an interpreter ended at its start: {_last_line(process)}") from error
        return process


def _judge(job: dict[str, Any], tests: SandboxedProcess, program: SandboxedProcess) -> Result:
    """Hand frames on between tests and program, until the verdict."""
    nonce = secrets.token_hex(16)
    gone: Result | None = None
    try:
        _send(tests, dumps({**job, "nonce": nonce}, _no_handle))
        while (frame := _receive(tests))[:1] == b">":
            answer = b""
            if gone is None:
                try:
                    _send(program, frame[1:])
                    answer = _receive(program)
                except LimitExceeded as error:
                    gone = Result.exceeded(error)
                except (EOFError, BrokenPipeError):
                    gone = _ended(program, "during the tests")
            _send(tests, answer)
    except LimitExceeded as error:
        return gone or Result(error.status, f"the tests {error.detail}", error.load)
    except (EOFError, BrokenPipeError) as error:
        raise SandboxError(f"the tests' process ended: {_last_line(tests)}") from error
    status, detail, said = loads(frame[1:], _no_handle)
    if gone is not None or status != "pass":
        return gone or Result(status, detail[:_DETAIL].encode(errors="replace").decode())
    if not secrets.compare_digest(said, nonce):
        raise SandboxError("the tests' process gave a wrong nonce")
    return Result("pass")


def _not_ready(kind: str, detail: str) -> Result:
    """The result of a program that could not be compiled, or that raised an exception before it was done."""
    if kind == "compile":
        return Result("compile", detail[:_DETAIL])
    return Result("memory" if detail.startswith("MemoryError") else "fail", f"{detail[:_DETAIL]} in the program")


def _ended(program: SandboxedProcess, when: str) -> Result:
    """The result of a program that left its process."""
    try:
        code = program.wait()
    except LimitExceeded as error:
        return Result.exceeded(error)
    if code > 128 and program.cpu_seconds >= program.limits.cpu_seconds:
        return Result("timeout", f"used more than {program.limits.cpu_seconds:g} s of CPU time")
    # Nobody here has killed it: it may have been the system, short of memory.
    return Result("fail", f"ended {when} with exit code {code}", load=code == 128 + 9)


def _send(process: SandboxedProcess, content: bytes) -> None:
    process.send(len(content).to_bytes(4, "little") + content)


def _receive(process: SandboxedProcess) -> bytes:
    """The next frame of a process.

    Raises:
        EOFError: It has ended.
        LimitExceeded: It exceeded a limit, or the frame that of a frame.
    """
    received = bytearray()
    while len(received) < 4 or len(received) < 4 + int.from_bytes(received[:4], "little"):
        if int.from_bytes(received[:4], "little") > MAX_BYTES:
            raise LimitExceeded("output", f"gave a result of more than {MAX_BYTES:,} bytes")
        if not (data := process.receive()):
            raise EOFError
        received += data
    return bytes(received[4:])


def _last_line(process: SandboxedProcess) -> str:
    lines = process.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it said nothing"


def _no_handle(*arguments: Any) -> Any:
    raise ValueError(f"not plain data: {arguments}")


@cache
def _compiled(*modules: str) -> bytes:
    """Modules of this folder as a frame for `_START`; the last one is the program."""
    codes = []
    for module in modules:
        source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
        codes.append((f"{_PACKAGE}.{module}", compile(source, f"{module}.py", "exec", dont_inherit=True)))
    data = marshal.dumps(codes)
    return len(data).to_bytes(4, "little") + data


PYTHON: Final = LanguageSupport(
    runner=PythonRunner,
    limits=Limits(cpu_seconds=10.0, wall_seconds=30.0, address_bytes=4 << 30),
    check_task=job_of,
)
"""10 s as in MBXP (Athiwaratkun et al. 2023), but of CPU time."""
