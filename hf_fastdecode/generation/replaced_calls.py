"""Replaces calls of a model's modules and methods for the time of forward passes, in any number of threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from threading import Lock
from typing import Any, NamedTuple

from torch import nn


class ReplacedCall(NamedTuple):
    """A module's attribute, which only replaced calls set, and what is called in its place."""

    module: nn.Module
    attribute: str
    call: Callable[..., Any]


class _Switch:
    """Puts calls on modules for the time of some passes, which may overlap in several threads.

    The first pass to enter sets a module's attribute, the last to leave removes it.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._entries: dict[tuple[int, str], int] = {}

    def enter(self, calls: Iterable[ReplacedCall]) -> None:
        with self._lock:
            for module, attribute, call in calls:
                key = id(module), attribute
                count = self._entries.get(key, 0)
                if count == 0 and vars(module).get(attribute) is not None:
                    continue  # the user's own, such as a compiled call
                self._entries[key] = count + 1
                vars(module)[attribute] = call

    def leave(self, calls: Iterable[ReplacedCall]) -> None:
        with self._lock:
            for module, attribute, _ in calls:
                key = id(module), attribute
                count = self._entries.pop(key, 0)
                if count > 1:
                    self._entries[key] = count - 1
                elif count == 1:
                    vars(module).pop(attribute, None)

    def is_taken(self, module: nn.Module, attribute: str) -> bool:
        """Whether the attribute is the user's own, such as a compiled call, which `enter` leaves in place."""
        with self._lock:
            return vars(module).get(attribute) is not None and (id(module), attribute) not in self._entries


replaced_calls = _Switch()
