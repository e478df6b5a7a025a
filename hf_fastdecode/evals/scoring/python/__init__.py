"""Checking Python programs: the program runs in one sandbox and the tests in another."""

from __future__ import annotations

import marshal
import platform
from functools import cache
from pathlib import Path
from typing import ClassVar, Final

from ...records import Task
from ...sandbox import Limits, python_command
from ..pairs import PairRunner, Role
from ..runner import LanguageSupport, Result
from .job import job_of
from .plain import dumps, no_handle

_PACKAGE: Final = "hf_fastdecode_scoring"
_MODULES: Final[dict[Role, tuple[str, ...]]] = {
    "server": ("messages", "plain", "remote", "referee"),
    "candidate": ("messages", "plain", "candidate"),
}

# Modules come compiled from the host, since the sandbox shows no folder of this package. What follows them on standard
# input is for `Messages`, so exactly their bytes are read.
_START: Final = f"""
import marshal, os, sys
def take(size):
    data = b""
    while len(data) < size:
        data += os.read(0, size - len(data)) or sys.exit("no modules")
    return data
for name, code in marshal.loads(take(int.from_bytes(take(4), "big"))):
    module = sys.modules[name] = type(sys)(name)
    module.__package__ = {_PACKAGE!r}
    exec(code, module.__dict__)
module.main(sys.modules["{_PACKAGE}.messages"].Messages())
"""


class PythonRunner(PairRunner):
    """Checks Python programs, each in two new sandboxes: tests leave traces in their process, such as modules."""

    _keeps_server: ClassVar[bool] = False
    _longest: ClassVar[int] = 16 << 20

    def _check(self, task: Task, completion: str) -> Result:
        """Of a task whose tests are valid Python; another raises ValueError."""
        program = task.program(completion).encode("utf-8", "surrogatepass")
        return self._tested([program], [dumps(job_of(task), no_handle)])

    def _launch(self, role: Role) -> tuple[list[str], list[Path]]:
        command, readable = python_command()
        return [*command, "-c", _START], list(readable)

    def _modules(self, role: Role) -> bytes:
        return _compiled(*_MODULES[role])


@cache
def _compiled(*modules: str) -> bytes:
    """Modules of this folder for `_START`; the last one is the program."""
    codes = []
    for module in modules:
        source = Path(__file__).with_name(f"{module}.py").read_text(encoding="utf-8")
        codes.append((f"{_PACKAGE}.{module}", compile(source, f"{module}.py", "exec", dont_inherit=True)))
    data = marshal.dumps(codes)
    return len(data).to_bytes(4, "big") + data


PYTHON: Final = LanguageSupport(
    runner=PythonRunner,
    limits=Limits(cpu_seconds=10.0, wall_seconds=30.0, address_bytes=4 << 30),
    check_task=job_of,
    version=platform.python_version,
)
"""10 s as in MBXP (Athiwaratkun et al. 2023), but of CPU time."""
