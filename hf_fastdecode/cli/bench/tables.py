"""``bench tables``: the settings of the papers' tables."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ...bench.generate.cases import WAYS
from ...bench.ops.cases import OpCase
from ...bench.paper_tables import PAPER_TABLES
from ...command_options import check_device, check_options
from ...errors import CommandError
from ...measurement.runner import check_out
from .generate import check_ways, run_generate
from .ops import OP_WAY_NAMES, check_backend, run_ops
from .options import CHECK, DEVICE, LIST, ONLY, PLOT, chosen, find_device, known, show_cases
from .report import report


def tables(
    table: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(PAPER_TABLES)}.", show_default="none")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them; takes hours.")] = False,
    way: Annotated[
        list[str] | None, typer.Option(help="As for `ops` and `generate`.", show_default="the table's")
    ] = None,
    only: Annotated[list[str] | None, ONLY] = None,
    device: Annotated[str, DEVICE] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed runs of each call, at most.", min=1)] = 2,
    check: Annotated[bool, CHECK] = True,
    plot: Annotated[bool, PLOT] = False,
    show: Annotated[bool, LIST] = False,
    out: Annotated[Path, typer.Option(help="Folder for a CSV file a table.")] = Path("runs/tables"),
) -> None:
    """The settings of the papers' tables, scaled to one GPU, with the numbers they published beside yours.

    Bifurcated attention: tables 1, 6 and 7. Hydragen: figures 1, 4 and 5, tables 1 and 2.

    Examples:

        hf-fastdecode bench tables --table bifurcated-1 --list
        hf-fastdecode bench tables --table bifurcated-6 --only 8192 --way compile
        hf-fastdecode bench tables --table hydragen-fig5 --plot
    """
    names = list(PAPER_TABLES) if everything else known("table", table or [], PAPER_TABLES)
    if not names:
        raise CommandError(f"no table was named; give --table with one of {', '.join(PAPER_TABLES)}, or --all")
    if out.is_file() and not show:
        raise CommandError(f"--out must be a folder, {str(out)!r} is a file; name a folder, which gets a file a table")
    cases: dict[str, list[Any]] = {name: chosen(PAPER_TABLES[name].cases, only) for name in names}
    check_device(device)
    for name in names:  # what is refused is refused before any is measured
        _check(way or PAPER_TABLES[name].ways, of_operators=_of_operators(name), show=show)
        if not show:
            check_out(_file(out, name))
    for name in names:
        setting = PAPER_TABLES[name]
        typer.echo(f"{name}: {setting.source}\n  {setting.scaled}")
        ways = way or list(setting.ways)
        file = _file(out, name)
        if show:
            show_cases(cases[name])
            continue
        from ...bench.generate.table import generate_table
        from ...bench.ops.table import ops_table

        if _of_operators(name):
            rows = run_ops(cases[name], ways, find_device(device), check, file)
            report(rows, file, ops_table, plot=plot)
        else:
            rows = run_generate(cases[name], ways, find_device(device), check, repeats, file)
            report(rows, file, partial(generate_table, published=setting.published, unit=setting.unit), plot=plot)


def _file(out: Path, name: str) -> Path:
    return out / f"{name}.csv"


def _of_operators(name: str) -> bool:
    return isinstance(PAPER_TABLES[name].cases[0], OpCase)


def _check(ways: Sequence[str], *, of_operators: bool, show: bool) -> None:
    """Refuse ways that a table does not have, and a backend that operators would not heed."""
    known("way", [one.partition("+")[0] for one in ways], OP_WAY_NAMES if of_operators else WAYS)
    if not of_operators:
        check_options()
        check_ways(ways)
    elif not show:
        check_backend()
