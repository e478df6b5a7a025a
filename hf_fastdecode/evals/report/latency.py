"""Reading ``latency.csv``: what drawing n samples took, as ``eval latency`` measured it."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, get_args

from ...errors import InputError
from ..records import Latency, Mode, Way

_COUNTS: Final = ("n", "peak_bytes", "runs")
_SECONDS: Final = tuple(field.name for field in fields(Latency) if field.default is math.nan)
_REQUIRED: Final = ("way", "mode", "n", "device", "last_sample_s")
_ONE_OF_EACH: Final = ("model", "dtype", "task", "format", "temperature", "top_p", "prompt_tokens", "new_tokens")
"""Further columns, in which all rows that have them must agree: a folder is about one model and one task."""


def read_latency(path: Path) -> tuple[Latency, ...]:
    """The rows of ``latency.csv``, sorted by device, way, mode and n.

    The column ``way`` is ``stock``, ``shared``, or ``shared:MODE`` where a mode was asked for by name. Where two ways
    ran in the same mode, the later row that has numbers counts.
    """
    try:
        reader = csv.DictReader(io.StringIO(path.read_text(encoding="utf-8")))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is no UTF-8 text; remove it and time again") from error
    columns = reader.fieldnames or ()
    if missing := [name for name in _REQUIRED if name not in columns]:
        raise InputError(f"{path} must have the columns {', '.join(_REQUIRED)}, got none named {missing[0]!r}")
    lines = list(reader)
    rows: dict[tuple[Any, ...], Latency] = {}
    asked: set[tuple[Any, ...]] = set()
    for number, line in enumerate(lines, 2):
        row = _row(path, number, line)
        place = row.device, row.way, row.mode, row.n
        if (line["way"], *place) in asked:
            raise InputError(
                f"{path}: there are two rows of {line['way']}, {row.mode}, n = {row.n} on {row.device}; remove one"
            )
        asked.add((line["way"], *place))
        if row.status == "ok" or place not in rows:
            rows[place] = row
    for name in _ONE_OF_EACH:
        if len(values := sorted({line[name] for line in lines if line.get(name)})) > 1:
            raise InputError(f"{path}: rows are of {name} {values[0]} and {values[1]}; keep those of one in a folder")
    ways, modes = get_args(Way), get_args(Mode)
    return tuple(
        sorted(rows.values(), key=lambda row: (row.device, ways.index(row.way), modes.index(row.mode), row.n))
    )


def read_subject(path: Path) -> dict[str, str]:
    """What ``latency.csv`` is about: model, dtype and task, where its columns say so."""
    with path.open(newline="", encoding="utf-8") as file:
        first = next(csv.DictReader(file), {})
    return {name: first[name] for name in ("model", "dtype", "task") if first.get(name)}


def _row(path: Path, number: int, line: Mapping[str, str]) -> Latency:
    def wrong(name: str, wanted: str) -> InputError:
        return InputError(f"{path}, line {number}: {name} must be {wanted}, got {line.get(name)!r}")

    values: dict[str, Any] = {"way": line["way"].partition(":")[0], "mode": line["mode"], "device": line["device"]}
    for name, known in (("way", get_args(Way)), ("mode", get_args(Mode))):
        if values[name] not in known:
            raise wrong(name, f"one of {', '.join(known)}")
    values["status"] = line.get("status") or "ok"
    for name in (*_COUNTS, *_SECONDS):
        if line.get(name):
            try:
                values[name] = int(line[name]) if name in _COUNTS else float(line[name])
            except ValueError:
                raise wrong(name, "a whole number" if name in _COUNTS else "a number") from None
    if values.get("n", 0) < 1:
        raise wrong("n", "a whole number of at least 1")
    if values["status"] == "ok" and not 0 < values.get("last_sample_s", 0) < math.inf:
        raise wrong("last_sample_s", "above 0 seconds where the status is ok")
    return Latency(**values)
