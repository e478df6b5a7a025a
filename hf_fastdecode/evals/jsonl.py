"""JSON lines that survive an interruption: appended in batches, and read without a last line that was cut off."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Final, Self, TypeVar, get_args

from ..errors import CommandError
from .records import Sample, Status, Verdict

SampleOrVerdict = TypeVar("SampleOrVerdict", Sample, Verdict)
_BLOCK: Final = 1 << 16


class JsonlWriter:
    """Appends lines to a file, which is made with its folder if need be.

    A last line that an interruption cut off is removed first, so that no line is glued to it. A context manager.

    Args:
        path: Of the file.

    Raises:
        CommandError: The file ends in something else, and is left as it is.
    """

    def __init__(self, path: Path):
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: BinaryIO = path.open("a+b")  # writes go to the end, wherever reads were
        start = _tail_start(self._file)
        self._file.seek(start)
        tail = self._file.read()
        if _object(tail) is not None:  # whole: another program ends its files without a newline
            self._file.write(b"\n")
        elif tail.startswith(b"{"):
            self._file.truncate(start)
        elif tail:  # no line of an object that was cut off: this is another file
            self._file.close()
            raise CommandError(f"{path} does not end in a JSON object; name another file to write to")

    def write(self, records: Iterable[Mapping[str, Any] | Sample | Verdict]) -> None:
        """Append a batch; when this returns, the disk has it.

        Raises:
            ValueError: A number is NaN or infinite, which JSON does not have; nothing of the batch is written.
        """
        batch = [record if isinstance(record, Mapping) else asdict(record) for record in records]
        text = "".join(json.dumps(line, ensure_ascii=False, allow_nan=False) + "\n" for line in batch)
        # A lone surrogate, as half a character that a model was cut off in, has no UTF-8 but has an escape.
        self._file.write(text.encode("utf-8", errors="backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file, one a line; empty lines are skipped, and so is a last line that was cut off.

    Raises:
        CommandError: Another line is not a JSON object.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            found = _object(line)
            if found is not None:
                yield found
            elif line.endswith(b"\n"):
                raise CommandError(f"{path}, line {number}: expected a JSON object, got {line[:60]!r}; mend it")


def read_samples(path: Path) -> list[Sample]:
    """The samples of a file that `JsonlWriter` wrote; further fields are ignored.

    Raises:
        CommandError: A line is not a JSON object or lacks a field.
    """
    return [_record(path, Sample, line) for line in read_jsonl(path)]


def read_verdicts(path: Path) -> list[Verdict]:
    """The verdicts of a file that `JsonlWriter` wrote; further fields are ignored.

    Raises:
        CommandError: A line is not a JSON object, lacks a field, or has an unknown status.
    """
    verdicts = [_record(path, Verdict, line) for line in read_jsonl(path)]
    for verdict in verdicts:
        if verdict.status not in get_args(Status):
            raise CommandError(
                f"{path}: status must be one of {', '.join(get_args(Status))}, got {verdict.status!r} for sample "
                f"{verdict.index} of task {verdict.task_id!r}; score the samples again"
            )
    return verdicts


def _record(path: Path, kind: type[SampleOrVerdict], line: Mapping[str, Any]) -> SampleOrVerdict:
    for field in fields(kind):
        if field.name not in line and field.default is MISSING:
            raise CommandError(
                f"{path}: a {kind.__name__.lower()} must have the field {field.name!r}, got only "
                f"{', '.join(sorted(line)) or 'none'}"
            )
    given = {field.name: line[field.name] for field in fields(kind) if field.name in line}
    for name, value in given.items():
        wanted, is_right = _KINDS[name]
        if not is_right(value):
            raise CommandError(f"{path}: {name} of a {kind.__name__.lower()} must be {wanted}, got {value!r}; mend it")
    return kind(**given)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_log_probability(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and -math.inf < value <= 0)


_TEXT: Final = "a text", lambda value: isinstance(value, str)
_SUM: Final = "a finite number of at most 0, or null", _is_log_probability
_KINDS: Final[dict[str, tuple[str, Callable[[Any], bool]]]] = {
    **dict.fromkeys(("task_id", "completion", "status", "detail", "outputs"), _TEXT),
    **dict.fromkeys(("sum_logp", "sum_processed_logp"), _SUM),
    "index": ("a whole number of at least 0", _is_count),
    "tokens": ("a whole number of at least 0, or null", lambda value: value is None or _is_count(value)),
}


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:  # of JSON and of UTF-8
        return None
    return found if isinstance(found, dict) else None


def _tail_start(file: BinaryIO) -> int:
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
