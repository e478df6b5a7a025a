"""Cells of tables of measurements, and the places of documentation pages that tables are written to."""

from __future__ import annotations

import re
from collections.abc import Callable

from hf_fastdecode.measurement.rows import Measurement


def cell(row: Measurement | None, shown: Callable[[Measurement], str]) -> str:
    """A number of a measurement, or the first words of its status where there is none; empty without a measurement."""
    if row is None:
        return ""
    return shown(row) if row["status"] == "ok" else row["status"].partition(":")[0]


def microseconds(row: Measurement) -> str:
    return f"{float(row['us_p50']):.1f}"


def replace_between(text: str, markers: re.Pattern[str], made: Callable[[re.Match[str]], str]) -> tuple[str, int]:
    """The page with the lines between markers (first and last group) replaced by what `made` makes; and how many."""
    return markers.subn(lambda match: match[1] + made(match) + match[match.re.groups], text)
