"""The prompts of a command: from options, a file or stdin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from ..command_errors import CommandError


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
        texts, places = list(prompts), ["--prompt"] * len(prompts)
    elif files:
        texts, places = [_read(file) for file in files], [str(file) for file in files]
    elif stdin.isatty():
        raise CommandError("there is no prompt; pass --prompt TEXT or --prompt-file FILE, or pipe text to stdin")
    else:
        texts, places = [_decode(stdin.buffer.read(), "stdin")], ["stdin"]
    if empty := [index for index, text in enumerate(texts) if not text]:
        raise CommandError(
            f"prompt {empty[0]} (from {places[empty[0]]}) is empty; a completion needs a text to follow"
        )
    return texts


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
            f"{place} is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); give a text file"
        ) from error
