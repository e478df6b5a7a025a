"""What the commands of the bench have in common: their cases, the device, and what they show of measurements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hf_fastdecode.cli.bench import C, refuse_red
from hf_fastdecode.cli.console import FailedCheck
from hf_fastdecode.cli.tables import show_tables
from hf_fastdecode.errors import InputError

if TYPE_CHECKING:
    from hf_fastdecode.measurement.rows import Case, Measurement

_NOISY = 1.5  # 80th percentile over the 20th
_MOST_NAMED = 5


def chosen(cases: Iterable[C], only: Sequence[str] | None) -> list[C]:
    """The cases, each once, of which `only` keeps those that contain one of its texts."""
    found = list(dict.fromkeys(cases))
    if only:
        found = [case for case in found if any(text in _in_words(case) for text in only)]
    if not found:
        raise InputError(f"no case contains {' or '.join(map(repr, only or []))}; --list without --only shows all")
    return found


def show_cases(cases: Iterable[Case]) -> None:
    """A line for each case, for ``--list``."""
    for case in cases:
        typer.echo(_in_words(case))


def _in_words(case: Case) -> str:
    return "  ".join(f"{name}={value}" for name, value in case.columns().items() if value != "")


def report(rows: list[Measurement], out: Path, table: Callable[[list[Measurement]], str], *, plot: bool) -> None:
    """Show measurements as a table, and draw them if asked to; raises `FailedCheck` if a check was red."""
    from ..figures import plot as draw

    refuse_red(rows, out)
    if rows and all(row["status"].startswith("not run: ") for row in rows):
        raise FailedCheck(f"nothing was measured: {rows[0]['way']}: {rows[0]['status'].partition(': ')[2]}")
    show_tables(table(rows))
    if noise := noisy(rows):
        typer.echo(noise)
    typer.echo(f"rows: {out}")
    if plot:
        pictures = draw(rows, out.with_suffix(""))
        typer.echo(
            "\n".join(f"picture: {path}" for path in pictures)
            or "no picture: they need cases that differ in n, or in the context, alone"
        )


def report_workload(
    rows: list[Measurement],
    out: Path,
    table: Callable[[Sequence[Measurement]], str],
    draw: Callable[[Sequence[Measurement], Path], Path],
) -> None:
    """Show measurements of a workload as a table and draw them; raises `FailedCheck` if nothing is right."""
    refuse_red(rows, out)
    if all(row["status"] != "ok" for row in rows):
        raise FailedCheck(f"nothing was measured: {rows[0]['way']}: {rows[0]['status']}")
    show_tables(table(rows))
    for row in rows:
        if row["status"] != "ok":
            at = f"{row['problems']}x{row['samples']}" if "problems" in row else f"{row['questions']} questions"
            typer.echo(f"{at}, {row['way']}: {row['status']}")
    typer.echo(f"rows: {out}\npicture: {draw(rows, out.with_suffix('.png'))}")


def noisy(rows: Sequence[Measurement]) -> str:
    """One line that names the rows whose times differ much from call to call, the worst first; empty without any."""
    found: list[tuple[float, str]] = []
    for row in rows:
        name = "us" if "us_p20" in row else "ms_per_step"
        if not (row.get(f"{name}_p20") and row.get(f"{name}_p80")):
            continue
        low, high = float(row[f"{name}_p20"]), float(row[f"{name}_p80"])
        if high > _NOISY * low:  # a step is a difference of two calls, which noise can make less than nothing
            spread = f"{high / low:.1f} times p20" if low > 0 else f"{high:.2g}, p20 {low:.2g}"
            found.append((high / low if low > 0 else inf, f"{_named(row, rows)} (p80 {spread})"))
    if not found:
        return ""
    names = [name for _, name in sorted(found, key=lambda entry: -entry[0])]
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return f"noisy: {', '.join(names[:_MOST_NAMED])}{more}; measure again on an idle machine, with another --out"


def _named(row: Measurement, rows: Sequence[Measurement]) -> str:
    """The case and way of a row, with what of the case differs among the rows."""
    if "case" in row:
        return f"{row['case']} {row['way']}"
    differing = [row[name] for name in ("shape", "finish") if len({other.get(name) for other in rows}) > 1]
    return " ".join(part for part in (*differing, f"{row['context']}x{row['samples']}", row["way"]) if part)
