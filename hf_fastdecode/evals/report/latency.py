"""Measured latency of drawing n samples: `latency.csv`, written by the generation stage and read by the report."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from ...command_errors import CommandError
from .files import write_text

Way = Literal["shared", "stock"]
Mode = Literal["eager", "graph", "compile"]


@dataclass(frozen=True)
class Latency:
    """Drawing n samples of one prompt, in one way on one device: a row of ``latency.csv``, whose columns these are.

    Times are medians (p50) over repeats, or their 90th percentile where the name says so; NaN (an empty cell) where
    unknown. They are measured in runs of their own and say nothing about which samples pass.

    Attributes:
        way: ``shared`` (hf_fastdecode) or ``stock`` (transformers).
        mode: How decode steps run.
        n: Samples drawn at once.
        device: Such as ``NVIDIA H200`` or ``x86_64 CPU, 2 threads``.
        prefill_s: Seconds to the first token.
        ms_per_step_p50: Milliseconds of a decode step.
        ms_per_step_p90: The same, 90th percentile.
        first_sample_s: Seconds from the call to the first finished sample.
        median_sample_s: To the median finished sample.
        last_sample_s: To the last one, when all can be ranked: what accuracy is set against.
        first_sample_s_p90: 90th percentile over repeats.
        median_sample_s_p90: 90th percentile over repeats.
        last_sample_s_p90: 90th percentile over repeats.
        peak_bytes: Highest memory in use; None where unknown.
        runs: Repeats, after a warm-up.
        status: ``ok``, or why there are no numbers, such as ``out of memory``.
    """

    way: Way
    mode: Mode
    n: int
    device: str
    prefill_s: float = math.nan
    ms_per_step_p50: float = math.nan
    ms_per_step_p90: float = math.nan
    first_sample_s: float = math.nan
    median_sample_s: float = math.nan
    last_sample_s: float = math.nan
    first_sample_s_p90: float = math.nan
    median_sample_s_p90: float = math.nan
    last_sample_s_p90: float = math.nan
    peak_bytes: int | None = None
    runs: int = 0
    status: str = "ok"


_COLUMNS = tuple(field.name for field in fields(Latency))
_SECONDS = tuple(field.name for field in fields(Latency) if field.default is math.nan)
_REQUIRED = ("way", "mode", "n", "device", "last_sample_s")


def write_latency(path: Path, rows: Iterable[Latency], extra: Mapping[str, Any] | None = None) -> None:
    """Write ``latency.csv`` under a temporary name, then rename it.

    Args:
        path: Of the file.
        rows: Its rows.
        extra: Further columns, the same in each row, such as versions and the command.
    """
    lines: list[dict[str, Any]] = []
    for row in rows:
        unknown = {name: "" for name, value in asdict(row).items() if value is None or value != value}
        lines.append({**asdict(row), **unknown, **(extra or {})})

    def write(file: Any) -> None:
        writer = csv.DictWriter(file, [*_COLUMNS, *(extra or {})], lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)

    write_text(path, write)


def read_latency(path: Path) -> tuple[Latency, ...]:
    """The rows of ``latency.csv``, sorted by device, way, mode and n; further columns are ignored.

    Raises:
        CommandError: A required column is missing (way, mode, n, device, last_sample_s), a value is not of its
            column's kind, or two rows are of the same measurement.
    """
    with path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        columns = reader.fieldnames or ()
        if missing := [name for name in _REQUIRED if name not in columns]:
            raise CommandError(f"{path} must have the columns {', '.join(_REQUIRED)}, got none named {missing[0]!r}")
        rows = [_row(path, number, line) for number, line in enumerate(reader, 2)]
    seen: set[tuple[Any, ...]] = set()
    for row in rows:
        at = (row.device, row.way, row.mode, row.n)
        if at in seen:
            raise CommandError(
                f"{path}: there are two rows of {row.way}, {row.mode}, n = {row.n} on {row.device}; keep one model "
                "and one context in a folder"
            )
        seen.add(at)
    ways, modes = get_args(Way), get_args(Mode)
    return tuple(sorted(rows, key=lambda row: (row.device, ways.index(row.way), modes.index(row.mode), row.n)))


def _row(path: Path, number: int, line: Mapping[str, str]) -> Latency:
    def wrong(name: str, wanted: str) -> CommandError:
        return CommandError(f"{path}, line {number}: {name} must be {wanted}, got {line.get(name)!r}")

    for name, known in (("way", get_args(Way)), ("mode", get_args(Mode))):
        if line[name] not in known:
            raise wrong(name, f"one of {', '.join(known)}")
    values: dict[str, Any] = {name: line[name] for name in ("way", "mode", "device")}
    values["status"] = line.get("status") or "ok"
    for name in ("n", "peak_bytes", "runs"):
        if line.get(name):
            try:
                values[name] = int(line[name])
            except ValueError:
                raise wrong(name, "a whole number") from None
    for name in _SECONDS:
        if line.get(name):
            try:
                values[name] = float(line[name])
            except ValueError:
                raise wrong(name, "a number") from None
    if values.get("n", 0) < 1:
        raise wrong("n", "a whole number of at least 1")
    if values["status"] == "ok" and not 0 < values.get("last_sample_s", 0) < math.inf:
        raise wrong("last_sample_s", "above 0 seconds where the status is ok")
    return Latency(**values)
