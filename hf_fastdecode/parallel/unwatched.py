"""What a process of a model tells the watch over its peers, and the watch of a process that has none."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol


class Clearable(Protocol):
    """What keeps the communicators of NCCL from closing, as a captured graph does."""

    def clear(self) -> None: ...


class Unwatched:
    """What `PeerWatch` is to a process with a model of its own."""

    failed: tuple[int, str] | None = None

    def call(self, name: str, timeout: float) -> AbstractContextManager[None]:
        return nullcontext()

    def running_pass(self, timeout: float) -> AbstractContextManager[None]:
        return nullcontext()

    def enter_foreign_loop(self) -> None: ...

    def frees(self, one: Clearable) -> None: ...

    def at(self, place: str) -> None: ...

    def step(self, doing: str) -> None: ...


UNWATCHED = Unwatched()
