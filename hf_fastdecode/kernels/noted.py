"""Notes of what a pass asks kernels for, from which its launches with other numbers of rows can be listed."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple


class Note(NamedTuple):
    """What was asked for.

    Attributes:
        ask: Asks for the same, for so many rows over another forest.
        of_nodes: Whether it depends on the forest, too.
    """

    ask: Callable[[int, Any], object]
    of_nodes: bool


_notes: ContextVar[dict[Hashable, Note] | None] = ContextVar("hf_fastdecode_notes", default=None)


@contextmanager
def taking_notes() -> Iterator[dict[Hashable, Note]]:
    """Context whose passes, of this thread, leave notes; yields them, each with what tells it from others."""
    notes: dict[Hashable, Note] = {}
    token = _notes.set(notes)
    try:
        yield notes
    finally:
        _notes.reset(token)


def note(key: Hashable, ask: Callable[[int, Any], object], *, of_nodes: bool) -> None:
    """Leave a note, where they are taken."""
    if (notes := _notes.get()) is not None:
        notes.setdefault(key, Note(ask, of_nodes))
