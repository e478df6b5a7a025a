"""Files that survive an interruption: written whole, held by one process, JSON lines and CSV rows.

A file that is being written is named `*.partial`; an interruption leaves the old one, or none.
"""

from __future__ import annotations

import csv
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final, Self

from .errors import InputError

if os.name == "posix":
    import fcntl

_BLOCK: Final = 1 << 16
_SHOWN: Final = 60  # letters of a value in an error


def partial_of(path: Path) -> Path:
    """The temporary name of a file that is being written. It keeps no suffix that a glob of finished files matches."""
    return path.with_name(f"{path.name}.partial")


def write_whole(path: Path, write: Callable[[Path], object]) -> Path:
    """Have a file written under a temporary name and rename it; when this returns, the disk has it.

    Its folder is made if need be. If it is a link, what it names is replaced, not the link.
    """
    target = path.resolve()
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = partial_of(target)
    partial.unlink(missing_ok=True)  # left by a process that was killed
    try:
        write(partial)
        with partial.open("r+b") as file:  # before the rename, which may otherwise reach the disk first
            os.fsync(file.fileno())
        os.replace(partial, target)
        _sync_folder(target.parent)
    finally:
        partial.unlink(missing_ok=True)
    return path


def _sync_folder(folder: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):  # Windows cannot open one
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with suppress(OSError):  # some network file systems refuse it for folders
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> Path:
    """Write a whole text file in UTF-8. A lone surrogate, such as half a character of a cut-off text, is escaped."""
    content = text.encode("utf-8", errors="backslashreplace")
    return write_whole(path, lambda partial: partial.write_bytes(content))


def write_json(path: Path, content: Any, indent: int = 1) -> Path:
    """Write a whole JSON file; a number that is NaN or infinite is a ValueError."""
    return write_text(path, json.dumps(content, indent=indent, allow_nan=False) + "\n")


@contextmanager
def exclusive(path: Path, held: Exception | None) -> Iterator[None]:
    """Keep other processes and threads away from a file or folder, as far as they use this function too.

    Where one holds it, `held` is raised; None waits for it. Of a file, a hidden one beside it is locked, which stays:
    removing it could let two processes hold it at once. On a file system without locks nothing is locked.
    """
    if os.name != "posix":
        yield
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        descriptor = os.open(path, os.O_RDONLY)
    else:
        descriptor = os.open(path.with_name(f".{path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if held is None else fcntl.LOCK_NB))
        except BlockingIOError as error:
            assert held is not None
            raise held from error
        except OSError:  # a file system without locks, each raises another error
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # also for a forked child, which has the descriptor too
    finally:
        os.close(descriptor)


def json_lines(records: Iterable[Any], *, ascii_only: bool = False) -> str:
    """Mappings or dataclasses as JSON objects, one per line; a ValueError for a number that is NaN or infinite."""
    lines = (record if isinstance(record, Mapping) else asdict(record) for record in records)
    return "".join(json.dumps(line, ensure_ascii=ascii_only, allow_nan=False) + "\n" for line in lines)


class JsonlWriter:
    """Appends JSON objects to a file, one per line; a context manager.

    A last line that an interruption cut off is removed first, so that no line is appended to it. A file that ends in
    something other than a JSON object is left as it is, with an InputError.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b")  # writes go to the end, wherever reads were
        start = _start_of_last_line(self._file)
        self._file.seek(start)
        last = self._file.read()
        if _object(last) is not None:  # whole: another program ends its files without a newline
            self._file.write(b"\n")
        elif last.startswith(b"{"):
            self._file.truncate(start)
        elif last:
            self._file.close()
            raise InputError(f"{path} does not end in a JSON object; name another file to write to")

    def write(self, records: Iterable[Any]) -> None:
        """Append a batch of mappings or dataclasses; when this returns, the disk has it.

        A number that is NaN or infinite is a ValueError; nothing of the batch is written.
        """
        self._file.write(json_lines(records).encode("utf-8", errors="backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self._file.close()


def _start_of_last_line(file: BinaryIO) -> int:
    """Where the last line begins if it has no newline, else the end of the file."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - _BLOCK)
        file.seek(start)
        newline = file.read(end - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file of `JsonlWriter`; empty lines and a last line that was cut off are skipped.

    Another line that is not a JSON object is an InputError.
    """
    return (record.fields for record in jsonl_records(path))


def jsonl_records(path: Path) -> Iterator[Record]:
    """The objects of `read_jsonl`, each with its file and line for error messages."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            found = _object(line)
            if found is not None:
                yield Record(found, f"{path} line {number}")
            elif line.endswith(b"\n"):
                got = shown(line.decode("utf-8", errors="backslashreplace").strip())
                raise InputError(f"{path} line {number}: expected a JSON object, got {got}; mend or delete that line")


def shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 4]} ..."


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:  # of JSON and of UTF-8
        return None
    return found if isinstance(found, dict) else None


@dataclass(frozen=True)
class Record:
    fields: dict[str, Any]
    place: str  # file and line, or position in the array, for errors

    def text(self, name: str, default: str | None = None) -> str:
        """A string field, or the default where it is missing or null; else an InputError."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.error(f"field {name!r} must be a text, got {self._shown(name)}; mend that record")
        return value

    def texts(self, name: str, default: tuple[str, ...] | None = None) -> tuple[str, ...]:
        """A field that is a list of strings, as `text` reads one."""
        value = self.fields.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self.error(f"field {name!r} must be a list of texts, got {self._shown(name)}; mend that record")
        return tuple(value)

    def error(self, message: str) -> InputError:
        return InputError(f"{self.place}: {message}")

    def _shown(self, name: str) -> str:
        if name not in self.fields:
            return "none; the fields are " + (", ".join(sorted(self.fields)[:12]) or "none")
        return shown(self.fields[name])


def read_bytes(path: Path) -> bytes:
    """A file's content, decompressed if its name ends in `.gz`."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except IsADirectoryError as error:
        raise InputError(f"{path} is a folder; name a file of JSON lines") from error
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path} is not a whole gzip file ({error}); decompress it or copy it again") from error
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; name a file of JSON lines") from error


def parse_records(content: bytes, path: Path) -> list[Record]:
    """The records of a file that others wrote: one array if it begins with a bracket, else one object per line."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not UTF-8 text (byte {error.start}); name a file of JSON lines") from error
    if text.lstrip().startswith("["):
        items = _parsed(text, str(path))
        placed = [(f"{path} item {number}", item) for number, item in enumerate(items, 1)]
    else:
        lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
        placed = [(f"{path} line {number}", _parsed(line, f"{path} line {number}")) for number, line in lines]
    if not placed:
        raise InputError(f"{path} holds no records; name a file of JSON lines")
    for source, item in placed:
        if not isinstance(item, dict):
            raise InputError(f"{source}: expected a JSON object, got {type(item).__name__}; name a file of JSON lines")
    return [Record(item, source) for source, item in placed]


def _parsed(text: str, source: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        remedy = "mend it, or name a file of JSON lines"
        raise InputError(f"{source}: expected JSON, got {shown(text)} ({error}); {remedy}") from error


def write_rows(
    path: Path, rows: Sequence[Mapping[str, Any]], *, columns: Sequence[str] = (), line_end: str = "\r\n"
) -> Path:
    """Write a whole CSV file, with a column for each name that occurs in a row, after the given ones."""
    names = list(dict.fromkeys([*columns, *(name for row in rows for name in row)]))

    def write(partial: Path) -> None:
        with partial.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, names, lineterminator=line_end)
            writer.writeheader()
            writer.writerows(rows)

    return write_whole(path, write)


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file written by `write_rows`."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
