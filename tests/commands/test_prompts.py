"""Prompts come verbatim, from one place."""

import io
from pathlib import Path

import pytest

from hf_fastdecode.command_errors import CommandError
from hf_fastdecode.commands.prompts import read_prompts


def stdin(content: bytes = b"", *, terminal: bool = False) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO(content))
    stream.isatty = lambda: terminal
    return stream


def test_the_three_places(tmp_path: Path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("  é\r\n\n".encode())
    assert read_prompts(["a ", "b"], None, stdin(b"not read")) == ["a ", "b"]
    assert read_prompts([], file, stdin(b"not read")) == ["  é\r\n\n"]
    assert read_prompts([], None, stdin(b"from a pipe\n")) == ["from a pipe\n"]


def test_what_is_no_prompt(tmp_path: Path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    empty = tmp_path / "empty"
    empty.touch()
    for arguments, message in (
        ((["a"], binary, stdin()), "both given"),
        ((["a", ""], None, stdin()), "prompt 1 \\(from --prompt\\) is empty"),
        (([], tmp_path / "missing", stdin()), "missing: No such file"),
        (([], tmp_path, stdin()), "is a folder"),
        (([], binary, stdin()), "not UTF-8 text \\(byte 2 is 0xff\\)"),
        (([], empty, stdin()), "empty\\) is empty"),
        (([], None, stdin(b"\xfe")), "stdin is not UTF-8"),
        (([], None, stdin()), "\\(from stdin\\) is empty"),
        (([], None, stdin(terminal=True)), "there is no prompt; pass --prompt"),
    ):
        with pytest.raises(CommandError, match=message):
            read_prompts(*arguments)
