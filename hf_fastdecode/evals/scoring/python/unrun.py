"""Tests that would never run: with them every program passes, so their task is refused."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

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
    """Why tests would run in part only, or not at all; empty where that cannot be told of them.

    Args:
        trees: The tests.
        setup: What runs before them.
        calls_check: Whether `check` is called after them.
    """
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
    """The first definition that looks like a test and that nothing uses; empty if there is none.

    Among further statements that is one with a test's name, since helpers may be left over; else any.

    Args:
        sources: Nodes that run, of each source.
        trees: Where names are used.
        used: Names that are used elsewhere.
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
