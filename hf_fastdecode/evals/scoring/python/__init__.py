"""Checking Python programs: the program runs in one sandbox and the tests in another."""

from __future__ import annotations

import binascii
import marshal
import platform
import zlib
from functools import cache
from pathlib import Path
from types import CodeType
from typing import ClassVar, Final

from ...records import Task
from ...sandbox import ForkedPython, ForkServer, Limits, Sandbox, SandboxedProcess, SandboxError, python_command
from ..runner import LanguageSupport, PairRunner, Result, Role
from .job import job_of
from .plain import dumps

_PACKAGE: Final = "hf_fastdecode_scoring"
_MODULES: Final[dict[Role, tuple[str, ...]]] = {
    "server": ("plain", "remote", "referee"),
    "candidate": ("plain", "candidate"),
}

# What programs and tests import most. None that imports a submodule of another package, as `typing` and `decimal` do
# with `collections.abc`: a program that forgets to import that would find it.
_IMPORTS: Final = (
    *("abc", "bisect", "calendar", "cmath", "collections", "contextlib", "copy", "datetime", "enum", "functools"),
    *("hashlib", "heapq", "itertools", "json", "math", "numbers", "operator", "random", "re", "string", "textwrap"),
    *("time", "types"),
)


class PythonRunner(PairRunner):
    """Checks Python programs, each in two new sandboxes: tests leave traces in their process, such as modules.

    Where the sandbox can fork, both are forked from interpreters that the runner keeps, one for programs and one for
    tests.
    """

    _keeps_server: ClassVar[bool] = False
    _longest: ClassVar[int] = 16 << 20

    def __init__(self, sandbox: Sandbox, limits: Limits):
        super().__init__(sandbox, limits)
        self._fork_servers: dict[Role, ForkServer] = {}

    def check(self, task: Task, completion: str) -> Result:
        try:
            result = super().check(task, completion)
        except SandboxError:
            self._end_fork_servers()
            raise
        for server in self._fork_servers.values():
            server.prepare()
        return result

    def _check(self, task: Task, completion: str) -> Result:
        program = task.program(completion).encode("utf-8", "surrogatepass")
        return self._tested([program], [dumps(job_of(task))])

    def _open(self, role: Role, limits: Limits) -> SandboxedProcess:
        if not self._sandbox.forks:
            return super()._open(role, limits)
        if (kept := self._fork_servers.pop(role, None)) is not None:
            try:
                process = kept.fork(limits)
            except SandboxError:  # it may have been killed, as by a system without memory
                kept.close()
            else:
                self._fork_servers[role] = kept
                return process
        server = self._fork_servers[role] = self._sandbox.fork_server(
            ForkedPython(_IMPORTS, _compiled(role), _start(role))
        )
        return server.fork(limits)

    def _launch(self, role: Role) -> tuple[list[str], list[Path]]:
        command, readable = python_command()
        return [*command, "-c", _program(role)], list(readable)

    def _end_fork_servers(self) -> None:
        while self._fork_servers:
            self._fork_servers.popitem()[1].close()

    def __exit__(self, *raised: object) -> None:
        super().__exit__(*raised)
        self._end_fork_servers()


def _start(role: Role) -> str:
    main = f'sys.modules["{_PACKAGE}.{_MODULES[role][-1]}"].main'
    return f'{main}(sys.modules["{_PACKAGE}.plain"].Messages()); os._exit(0)'


@cache
def _program(role: Role) -> str:
    """A role's modules and its start as one program, since the sandbox shows no folder of this package.

    Compressed: an argument has at most 128 KiB.
    """
    data = binascii.b2a_base64(zlib.compress(marshal.dumps(_compiled(role))), newline=False)
    return f"""
import binascii, marshal, os, sys, zlib
for name, code in marshal.loads(zlib.decompress(binascii.a2b_base64({data!r}))):
    module = sys.modules[name] = type(sys)(name)
    module.__package__ = {_PACKAGE!r}
    exec(code, module.__dict__)
{_start(role)}"""


@cache
def _compiled(role: Role) -> tuple[tuple[str, CodeType], ...]:
    codes = []
    for module in _MODULES[role]:
        source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
        codes.append((f"{_PACKAGE}.{module}", compile(source, f"{module}.py", "exec", dont_inherit=True)))
    return tuple(codes)


PYTHON: Final = LanguageSupport(
    runner=PythonRunner,
    limits=Limits(cpu_seconds=10.0, wall_seconds=30.0, address_bytes=4 << 30),
    check_task=job_of,
    version=platform.python_version,
)
"""10 s as in MBXP (Athiwaratkun et al. 2023), but of CPU time."""
