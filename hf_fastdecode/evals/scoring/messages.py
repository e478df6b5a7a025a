"""Messages to sandboxed programs in other languages: lists of byte strings over standard input and output."""

from __future__ import annotations

import struct
from typing import Final

from ..sandbox import LimitExceeded, SandboxedProcess

_MOST_PARTS: Final = 1 << 20


class Peer:
    """A sandboxed process that speaks in messages.

    Args:
        process: Of which standard input and output carry nothing else.
        longest: Bytes of a message that it may send.
    """

    def __init__(self, process: SandboxedProcess, longest: int):
        self.process = process
        self._longest = longest
        self._received = bytearray()

    def send(self, *parts: bytes | str) -> None:
        """Send a message.

        Raises:
            BrokenPipeError: The process has ended.
            LimitExceeded: It exceeded a limit and was killed.
        """
        encoded = [part.encode(errors="replace") if isinstance(part, str) else part for part in parts]
        self.process.send(b"".join([_number(len(encoded)), *(_number(len(one)) + one for one in encoded)]))

    def receive(self) -> list[bytes]:
        """The next message.

        Raises:
            EOFError: The process closed its output, as by ending.
            LimitExceeded: It exceeded a limit, or the message that of a message.
        """
        parts: list[bytes] = []
        length = 0
        for _ in range(self._read_number(_MOST_PARTS)):
            parts.append(self._read(self._read_number(self._longest - length)))
            length += len(parts[-1]) + 4
        return parts

    def _read_number(self, largest: int) -> int:
        (number,) = struct.unpack(">I", self._read(4))
        if number > largest:
            raise LimitExceeded("output", f"gave a result of more than {self._longest:,} bytes")
        return int(number)

    def _read(self, size: int) -> bytes:
        while len(self._received) < size:
            if not (data := self.process.receive()):
                raise EOFError("it ended")
            self._received += data
        data = bytes(self._received[:size])
        del self._received[:size]
        return data


def one_line(text: bytes | str) -> str:
    """What a foreign process said, as one line of at most 300 letters."""
    said = text if isinstance(text, str) else text.decode(errors="replace")
    return " ".join(said.split())[:300]


def _number(value: int) -> bytes:
    return struct.pack(">I", value)
