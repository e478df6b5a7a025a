"""Frames over the standard streams of a sandboxed process: four bytes of length, little-endian, then the content."""

from __future__ import annotations

import os

MAX_BYTES = 16 << 20
"""Of a frame: the host ends programs that send larger ones."""


class Frames:
    """Takes over standard input and output, so that nothing else in the process reads or writes them by chance.

    From then on standard input is empty, and what is printed goes to standard error.
    """

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.dup2(2, 1)
        os.close(null)

    def receive(self) -> bytes:
        """The next frame; nothing once the other side is gone."""
        return self._take(int.from_bytes(self._take(4), "little"))

    def send(self, content: bytes) -> None:
        """Write a frame."""
        rest = memoryview(len(content).to_bytes(4, "little") + content)
        while rest:
            rest = rest[os.write(self._out, rest) :]

    def _take(self, size: int) -> bytes:
        parts = []
        while size and (part := os.read(self._in, min(size, 1 << 20))):
            parts.append(part)
            size -= len(part)
        return b"" if size else b"".join(parts)
