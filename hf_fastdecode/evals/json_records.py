"""Files of JSON records: one a line (`.jsonl`, also gzipped) or one array (`.json`)."""

from __future__ import annotations

import gzip
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hf_fastdecode.errors import CommandError


@dataclass(frozen=True)
class Record:
    """An object of a file.

    Attributes:
        fields: Its fields.
        place: File and line, or position in the array, for errors.
    """

    fields: dict[str, Any]
    place: str

    def text(self, name: str, default: str | None = None) -> str:
        """A field that holds a text.

        Args:
            name: Of the field.
            default: Where the field is missing or null; None if it must be there.

        Raises:
            CommandError: It is missing, or no text.
        """
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(f"field {name!r} must be a text, got {_shown(self.fields, name)}")
        return value

    def texts(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """A field that holds a list of texts.

        Args:
            name: Of the field.
            default: Where the field is missing or null; None if it must be there.

        Raises:
            CommandError: It is missing, or no such list.
        """
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(f"field {name!r} must be a list of texts, got {_shown(self.fields, name)}")
        return tuple(value)

    def error(self, message: str) -> CommandError:
        """An error that says where in the file it is."""
        return CommandError(f"{self.place}: {message}")


def read_bytes(path: Path) -> bytes:
    """A file's content, decompressed if its name ends in `.gz`.

    Raises:
        CommandError: It cannot be read, or is not gzipped.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except IsADirectoryError as error:
        raise CommandError(f"{path} is a folder; name a file of JSON lines") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise CommandError(f"{path} is not a whole gzip file ({error}); decompress it or copy it again") from error
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}; name a file of JSON lines") from error


def parse_records(content: bytes, path: Path) -> list[Record]:
    """The records of a file's content.

    Args:
        content: Decompressed; an array if it begins with a bracket, else an object a line.
        path: Of the file, for errors.

    Raises:
        CommandError: It is not UTF-8, not JSON, holds something else than objects, or nothing.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CommandError(f"{path} is not UTF-8 text (byte {error.start}); name a file of JSON lines") from error
    if text.lstrip().startswith("["):
        items = _parsed(text, str(path))
        placed = [(f"{path} item {number}", item) for number, item in enumerate(items, 1)]
    else:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        placed = [(f"{path} line {number}", _parsed(line, f"{path} line {number}")) for number, line in lines]
    if not placed:
        raise CommandError(f"{path} holds no records; name a file of JSON lines")
    for place, item in placed:
        if not isinstance(item, dict):
            raise CommandError(
                f"{place}: expected a JSON object, got {type(item).__name__}; name a file of JSON lines"
            )
    return [Record(item, place) for place, item in placed]


def _parsed(text: str, place: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise CommandError(f"{place}: not JSON ({error}); name a file of JSON lines") from error


def _shown(fields: dict[str, Any], name: str) -> str:
    if name not in fields:
        return "none; the fields are " + (", ".join(sorted(fields)[:12]) or "none")
    return repr(fields[name])[:60]
