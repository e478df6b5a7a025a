"""The one runner: cases times ways, a row for each, written as they come, taken up again where a run broke off."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from ..files import read_rows, write_rows
from .rows import Row


class Case(Protocol):
    """What a case must be able to do."""

    def columns(self) -> dict[str, Any]:
        """Columns that identify the case."""


C = TypeVar("C", bound=Case)

# A row is measured again, unless these and the case and the way are the same. Versions and device say what ran.
_SAME_RUN = ("device", "torch", "transformers", "commit", "command")

_SHOWN = (
    *("case", "shape", "context", "problems", "questions", "samples", "n", "finish", "to_token", "way", "variant"),
    *("us_p50", "over_floor", "tb_per_s", "first_call_s", "prefill_s", "ms_per_step", "tokens_per_s", "total_s"),
    *("ms_per_step_p50", "last_sample_s"),
)


def run(
    cases: Sequence[C],
    ways: Sequence[str],
    measure: Callable[[C, str], dict[str, Any]],
    *,
    provenance: dict[str, Any],
    out: Path,
) -> list[Row]:
    """Measure every way of every case, and write each row to `out` when it is there.

    Rows that `out` already has from the same commit and command are kept and not measured again; others give way to
    new ones of the same case, way and device, which is told, and else stay.

    Args:
        cases: The cases, in an order in which neighbours share what is dear to set up.
        ways: Names of the ways.
        measure: Gives the measured columns of a case and a way, ``status`` among them.
        provenance: The columns that every row begins with.
        out: The CSV file.

    Returns:
        The rows of these cases and ways, as `read_rows` reads them.
    """
    rows = {_key(row, cases[0]): row for row in (read_rows(out) if out.exists() else [])} if cases else {}
    asked = [(case, way, {**provenance, **case.columns(), "way": way}) for case in cases for way in ways]
    keys = [_key(head, case) for case, _, head in asked]
    if others := len({key for key, (*_, head) in zip(keys, asked, strict=True) if _gives_way(rows.get(key), head)}):
        print(
            f"{others} of {len(asked)} rows are in {out} from another commit, command or version and give way to new "
            "ones; name another --out to keep them",
            file=sys.stderr,
        )
    kept = 0
    try:
        with tqdm(total=len(asked), unit="row", dynamic_ncols=True, disable=None) as bar:
            for key, (case, way, head) in zip(keys, asked, strict=True):
                bar.set_postfix_str(f"{next(iter(case.columns().values()))} {way}", refresh=True)
                if not _is_done(rows.get(key), head):
                    rows[key] = _as_read(head | measure(case, way))
                    write_rows(out, list(rows.values()))
                    tqdm.write(brief(rows[key]), file=sys.stderr)
                else:
                    kept += 1
                bar.update()
    except KeyboardInterrupt:
        if rows:
            write_rows(out, list(rows.values()))  # once more, if that is what was broken off
        done = sum(_is_done(rows.get(key), head) for key, (*_, head) in zip(keys, asked, strict=True))
        print(
            f"interrupted: {done} of {len(asked)} rows are in {out}; run the same command again to go on",
            file=sys.stderr,
        )
        raise
    if kept:
        print(
            f"{kept} of {len(asked)} rows are those of an earlier run, kept in {out}; delete it to measure again",
            file=sys.stderr,
        )
    return [rows[key] for key in keys]


def failed(rows: Iterable[Row]) -> list[Row]:
    """The rows that were not measured because a check was red or an error was raised."""
    return [row for row in rows if row["status"].startswith(("wrong", "failed"))]


def brief(row: Row) -> str:
    """One line of what a row found."""
    named = {"case", "shape", "way"}
    parts = [row[name] if name in named else f"{name}={_short(row[name])}" for name in _SHOWN if row.get(name)]
    return "  ".join(parts + ([row["status"]] if row["status"] != "ok" else []))


def _short(value: str) -> str:
    try:
        return f"{float(value):.4g}" if "." in value else value
    except ValueError:
        return value


def _key(row: dict[str, Any], case: Case) -> tuple[Any, ...]:
    return tuple(str(row.get(name, "")) for name in ("device", *case.columns(), "way"))


def _is_done(row: Row | None, head: dict[str, Any]) -> bool:
    return row is not None and not failed([row]) and all(row.get(name) == str(head[name]) for name in _SAME_RUN)


def _gives_way(row: Row | None, head: dict[str, Any]) -> bool:
    """Whether a measurement that another run made is lost when the row is measured anew."""
    return row is not None and not failed([row]) and not _is_done(row, head)


def _as_read(row: dict[str, Any]) -> Row:
    return {name: "" if value is None else str(value) for name, value in row.items()}
