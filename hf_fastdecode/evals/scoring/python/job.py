"""What the tests' process is told: found out on the host, from the task alone."""

from __future__ import annotations

import ast
import builtins
import sys
from functools import lru_cache
from typing import Any, Final

from ...task import Task

_BUILTINS: Final = frozenset(dir(builtins))


@lru_cache(maxsize=4096)
def job_of(task: Task) -> dict[str, Any]:
    """The job for `referee`, without its nonce.

    Returns:
        ``stem``, run for the helpers that the tests use; empty where they use none. ``entry_point``. ``names`` that
        the program has to define or import: those that setup and tests use, but for builtins. ``modules`` among them,
        by the name of one and used like one. ``setup`` and ``tests``. Whether ``check``, which the tests define, is to
        be called with the entry point.

    Raises:
        ValueError: Setup or tests are not valid Python, or there are no tests.
    """
    if not task.tests:
        raise ValueError(f"task {task.task_id} has no tests; every program would pass")
    try:
        trees = [ast.parse(source) for source in (task.setup, *task.tests)]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the tests of task {task.task_id} are not valid Python: {error}") from error
    if outside := _imports_outside(trees[1:]):
        raise ValueError(
            f"the tests of task {task.task_id} import {outside}, and sandboxes have the standard library only; score "
            "them with the tool that they are from (eval export)"
        )
    nodes = [node for tree in trees for node in ast.walk(tree)]
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    names = used - _BUILTINS - _defined(trees) | {task.entry_point} - {""}
    if not names:  # a function that is named like a builtin: the tests call nothing else
        names = {node.func.id for node in nodes if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    bases = {id(node.value) for node in nodes if isinstance(node, ast.Attribute)}
    bare = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in bases}
    return {
        "stem": _complete(task.stem) if names - {task.entry_point} else "",
        "entry_point": task.entry_point,
        "names": sorted(names),
        "modules": sorted(names & sys.stdlib_module_names - bare),
        "setup": task.setup,
        "tests": list(task.tests),
        "check": _leaves_check_uncalled(trees),
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


def _imports_outside(trees: list[ast.Module]) -> str:
    """The first module outside the standard library that tests import at the top; empty if there is none."""
    for node in (node for tree in trees for node in tree.body):
        named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in named:
            if name.partition(".")[0] not in sys.stdlib_module_names:
                return name
    return ""


def _leaves_check_uncalled(trees: list[ast.Module]) -> bool:
    """Whether the tests define `check` (MBXP, HumanEval) and leave its call to whoever runs them."""
    body = [node for tree in trees for node in tree.body]
    defined = any(isinstance(node, ast.FunctionDef) and node.name == "check" for node in body)
    called = [node.value.func for node in body if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)]
    return defined and not any(isinstance(function, ast.Name) and function.id == "check" for function in called)


def _defined(trees: list[ast.Module]) -> set[str]:
    """Functions, classes and modules that setup and tests define or import themselves at the top."""
    found: set[str] = set()
    for node in (node for tree in trees for node in tree.body):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(alias.asname or alias.name).partition(".")[0] for alias in node.names}
    return found
