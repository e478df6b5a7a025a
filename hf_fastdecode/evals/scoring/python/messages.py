"""Messages over the standard streams of a sandboxed process: lists of byte strings, as the host's `Peer` has them."""

from __future__ import annotations

import os

TYPE_CHECKING = False  # importing `typing` takes longer than most programs
if TYPE_CHECKING:
    from collections.abc import Iterator


class Messages:
    """Takes over standard input and output, so that nothing else in the process reads or writes them by chance.

    From then on standard input is empty, and what is printed goes to standard error.
    """

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)

    def receive(self) -> list[bytes]:
        """The next message; nothing once the other side is gone."""
        return [self._take(self._number()) for _ in range(self._number())]

    def send(self, *parts: bytes) -> None:
        """Write a message."""
        rest = memoryview(b"".join(_encoded(parts)))
        while rest:
            rest = rest[os.write(self._out, rest) :]

    def _number(self) -> int:
        return int.from_bytes(self._take(4), "big")

    def _take(self, size: int) -> bytes:
        parts = []
        while size and (part := os.read(self._in, min(size, 1 << 20))):
            parts.append(part)
            size -= len(part)
        return b"" if size else b"".join(parts)


def _encoded(parts: tuple[bytes, ...]) -> Iterator[bytes]:
    yield len(parts).to_bytes(4, "big")
    for part in parts:
        yield len(part).to_bytes(4, "big")
        yield part
