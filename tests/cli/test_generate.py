"""Prompts come verbatim, from one place."""

import io
from pathlib import Path

import pytest

from hf_fastdecode.cli.generate import read_prompts
from hf_fastdecode.errors import InputError


def stdin(content: bytes = b"", *, terminal: bool = False) -> io.TextIOWrapper:
    stream = io.TextIOWrapper(io.BytesIO(content))
    stream.isatty = lambda: terminal
    return stream


def test_the_three_places(tmp_path: Path):
    file = tmp_path / "prompt.txt"
    file.write_bytes("  é\r\n\n".encode())
    assert read_prompts(["a ", "b"], [], stdin(b"not read")) == ["a ", "b"]
    second = tmp_path / "second.txt"
    second.write_text("b")
    assert read_prompts([], [file], stdin(b"not read")) == ["  é\r\n\n"]
    assert read_prompts([], [second, file, second], stdin(b"not read")) == ["b", "  é\r\n\n", "b"]
    assert read_prompts([], [], stdin(b"from a pipe\n")) == ["from a pipe\n"]


def test_what_is_no_prompt(tmp_path: Path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"ab\xff")
    empty = tmp_path / "empty"
    empty.touch()
    text = tmp_path / "text"
    text.write_text("a")
    for arguments, message in (
        ((["a"], [binary], stdin()), "both given"),
        ((["a", ""], [], stdin()), "prompt 1 \\(from --prompt\\) is empty"),
        (([], [tmp_path / "missing"], stdin()), "missing: No such file"),
        (([], [tmp_path], stdin()), "is a folder"),
        (([], [binary], stdin()), "not UTF-8 text \\(byte 2 is 0xff\\)"),
        (([], [empty], stdin()), "prompt 0 \\(from .*empty\\) is empty"),
        (([], [text, empty, text], stdin()), "prompt 1 \\(from .*empty\\) is empty"),
        (([], [], stdin(b"\xfe")), "stdin is not UTF-8"),
        (([], [], stdin()), "\\(from stdin\\) is empty"),
        (([], [], stdin(terminal=True)), "there is no prompt; pass --prompt"),
    ):
        with pytest.raises(InputError, match=message):
            read_prompts(*arguments)


def test_an_argument_is_utf8_whatever_the_locale():
    as_ascii = "é".encode().decode("ascii", "surrogateescape")
    assert read_prompts([as_ascii], [], stdin()) == ["é"]
    with pytest.raises(InputError, match="--prompt is not UTF-8 text"):
        read_prompts([b"a\xff".decode("ascii", "surrogateescape")], [], stdin())
