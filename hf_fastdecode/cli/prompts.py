"""The prompts of a command: from options, a file or stdin."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..errors import CommandError


def read_prompts(prompts: Sequence[str], files: Sequence[Path], stdin: TextIO) -> list[str]:
    """The prompts, verbatim, from one of the three places that may hold them.

    Args:
        prompts: Those on the command line; then the other two are not read.
        files: One prompt each.
        stdin: One prompt, if neither is given and it is no terminal.

    Raises:
        CommandError: There is no prompt, an empty one, or one that is not UTF-8 text.
    """
    if prompts and files:
        raise CommandError("--prompt and --prompt-file were both given; leave one out")
    if prompts:
        texts, places = [given_text(prompt, "--prompt") for prompt in prompts], ["--prompt"] * len(prompts)
    elif files:
        texts, places = [_read(file) for file in files], [str(file) for file in files]
    elif stdin.isatty():
        raise CommandError("there is no prompt; pass --prompt TEXT or --prompt-file FILE, or pipe text to stdin")
    else:
        texts, places = [_read_stdin(stdin)], ["stdin"]
    if empty := [index for index, text in enumerate(texts) if not text]:
        raise CommandError(
            f"prompt {empty[0]} (from {places[empty[0]]}) is empty; a completion needs a text to follow"
        )
    return texts


def given_text(text: str, place: str) -> str:
    """The text of an argument, in UTF-8 whatever the locale; under others Python leaves bytes that it cannot read.

    Raises:
        CommandError: It is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return _decode(os.fsencode(text), place)
    return text


def _read_stdin(stdin: TextIO) -> str:
    try:
        return _decode(stdin.buffer.read(), "stdin")
    except OSError as error:
        raise CommandError(f"cannot read stdin: {error.strerror}; pass --prompt TEXT or --prompt-file FILE") from error


def _read(file: Path) -> str:
    if file.is_dir():
        raise CommandError(f"{file} is a folder; name a text file")
    try:
        return _decode(file.read_bytes(), str(file))
    except OSError as error:
        raise CommandError(f"cannot read {file}: {error.strerror}; name a text file") from error


def _decode(content: bytes, place: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise CommandError(
            f"{place} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); convert it, such "
            "as with iconv -f latin1 -t utf-8"
        ) from error
