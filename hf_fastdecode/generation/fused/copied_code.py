"""Copies of a module's code that call other functions of the same global names.

A function that a model's file defines is a global name of that file. A module can run a copy of its ``forward`` in
which the name is another function; the file itself, and other models and threads, keep theirs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import CellType, FunctionType
from typing import Any


def global_named(name: str, forward: Callable[..., Any]) -> Any:
    """What a global name is in the code of a function, below its decorators; None if there is no such name."""
    return inspect.unwrap(forward).__globals__.get(name)


def calling(forward: Any, others: Mapping[str, Callable[..., Any]]) -> Callable[..., Any] | None:
    """A copy of a function, and of its decorators, in which names are others; None if they cannot be copied."""
    if not isinstance(forward, FunctionType):
        return None
    names, cells, wrapped = forward.__globals__, forward.__closure__ or (), getattr(forward, "__wrapped__", None)
    if wrapped is None:
        names = {**names, **others}
    else:
        inner = calling(wrapped, others)
        held = [cell for cell in cells if _contents(cell) is wrapped]
        if inner is None or not held:
            return None
        cells = tuple(CellType(inner) if cell in held else cell for cell in cells)
    copied = FunctionType(forward.__code__, names, forward.__name__, forward.__defaults__, cells)
    copied.__kwdefaults__ = forward.__kwdefaults__
    return copied


def _contents(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None
