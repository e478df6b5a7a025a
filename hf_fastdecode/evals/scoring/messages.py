"""Messages to programs in other languages, and a judgement by two of them.

The tests run in one process and the candidate in another. Where the tests call the candidate's function, the arguments
go through here to the candidate and its result comes back, both as plain data. So nothing that the candidate does to its
own process can reach a verdict: it can only answer calls.
"""

from __future__ import annotations

import struct
from typing import Final

from ..records import Status
from ..sandbox import LimitExceeded, SandboxedProcess, SandboxError

LONGEST: Final = 4 << 20
"""Bytes of a message; results that tests compare are a thousandth."""


class BrokenMessageError(Exception):
    """What a process wrote is no message."""


class Peer:
    """A sandboxed process that speaks in messages: lists of byte strings.

    Args:
        process: Of which standard input and output carry nothing else.
    """

    def __init__(self, process: SandboxedProcess):
        self.process = process
        self._received = bytearray()

    def send(self, *parts: bytes | str) -> None:
        """Send a message.

        Raises:
            BrokenPipeError: The process has ended.
            LimitExceeded: It exceeded a limit and was killed.
        """
        encoded = [part.encode(errors="surrogatepass") if isinstance(part, str) else part for part in parts]
        self.process.send(b"".join([_number(len(encoded)), *(_number(len(one)) + one for one in encoded)]))

    def receive(self) -> list[bytes]:
        """The next message.

        Raises:
            EOFError: The process closed its output, as by ending.
            BrokenMessageError: It wrote something else.
            LimitExceeded: It exceeded a limit and was killed.
        """
        count = self._read_number()
        parts, length = [], 0
        for _ in range(count):
            size = self._read_number()
            length += size + 4
            if length > LONGEST:
                break
            parts.append(self._read(size))
        if count > LONGEST // 4 or length > LONGEST:
            raise BrokenMessageError(f"a message of more than {LONGEST:,} bytes")
        return parts

    def _read_number(self) -> int:
        (number,) = struct.unpack(">I", self._read(4))
        return int(number)

    def _read(self, size: int) -> bytes:
        if size > LONGEST:
            raise BrokenMessageError(f"a message of more than {LONGEST:,} bytes")
        while len(self._received) < size:
            if not (data := self.process.receive()):
                raise EOFError
            self._received += data
        data = bytes(self._received[:size])
        del self._received[:size]
        return data


def judged(judge: Peer, candidate: Peer, *request: bytes | str) -> tuple[Status, str]:
    """Have a candidate tested.

    Args:
        judge: Runs tests: after the request it sends ``call`` and arguments, any number of times, and in the end
            ``pass`` or ``fail`` with a line of text. Trusted; it is ready for another request afterwards.
        candidate: Answers ``call`` with ``value`` and a result or with ``error`` and a text. Not trusted.
        request: Tells the judge what to test.

    Returns:
        Outcome, and a line about it.

    Raises:
        SandboxError: The judge broke down, which says nothing about the candidate.
    """
    ended: tuple[Status, str] | None = None
    try:
        judge.send(*request)
        while (message := judge.receive())[0] == b"call":
            if ended is None:
                kind, content, ended = _answer(candidate, message[1])
            judge.send(*((kind, content) if ended is None else ("error", "the program is gone")))
    except (EOFError, BrokenPipeError, BrokenMessageError, LimitExceeded) as error:
        said = bytes(judge.process.stderr).decode(errors="replace").strip()
        raise SandboxError(f"the tests' process broke down: {error or said or 'it ended'}") from error
    if ended is not None:
        return ended
    return ("pass", "") if message[0] == b"pass" else ("fail", one_line(message[1]))


def _answer(candidate: Peer, arguments: bytes) -> tuple[str, bytes, tuple[Status, str] | None]:
    """What a candidate answers to a call; if it does not, what became of it."""
    try:
        candidate.send(arguments)
        kind, content = candidate.receive()
    except LimitExceeded as error:
        return "", b"", (error.status, error.detail)
    except BrokenMessageError as error:
        return "", b"", ("output", str(error))
    except (EOFError, BrokenPipeError):
        return "", b"", how_it_ended(candidate.process)
    except ValueError:
        return "", b"", ("fail", "the program wrote over its answer")
    if kind == b"memory":
        return "", b"", ("memory", one_line(content))
    return ("value", content, None) if kind == b"value" else ("error", content, None)


def how_it_ended(process: SandboxedProcess) -> tuple[Status, str]:
    """The status of a process that closed its output before its tests were done."""
    said = bytes(process.stderr)
    try:
        code = process.wait()
    except LimitExceeded as error:
        return error.status, error.detail
    if b"out of memory" in said:
        return "memory", one_line(said)
    return "fail", f"ended before its tests did, with exit code {code}"


def one_line(text: bytes) -> str:
    """A text of a foreign process as one line of at most 300 letters."""
    return " ".join(text.decode(errors="replace").split())[:300]


def _number(value: int) -> bytes:
    return struct.pack(">I", value)
