"""What tests do that a program in another process does not notice, found in their syntax trees."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import Final

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
    """The same, of tests that hold objects of the program."""
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
