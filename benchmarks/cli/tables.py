"""``tables``: the settings of the papers' tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_fastdecode.cli.bench import find_device
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.cli.options import Device, Plot, Repeats, check_choice, check_device, check_enable_options
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.rows import Measurement, check_out

from ..generate.cases import WAYS
from ..ops.cases import OpCase
from ..paper_tables import PAPER_TABLES
from .generate import check_models, check_ways, run_generate
from .ops import OP_WAY_NAMES, check_backend, run_ops
from .options import Check, ListCases, Only, chosen, repeatable, report, show_cases


def tables(
    table: Annotated[list[str] | None, repeatable(PAPER_TABLES, "none")] = None,
    way: Annotated[
        list[str] | None, typer.Option(help="As for `ops` and `generate`.", show_default="the table's")
    ] = None,
    only: Only = None,
    device: Device = "auto",
    repeats: Repeats = 2,
    check: Check = True,
    plot: Plot = False,
    show: ListCases = False,
    out: Annotated[Path, typer.Option(help="Folder for a CSV file a table.")] = Path("runs/tables"),
) -> None:
    """The settings of the papers' tables, scaled to one GPU, with the numbers they published beside yours.

    Bifurcated attention: tables 1, 6 and 7. Hydragen: figures 1, 4 and 5, tables 1 and 2.

    Examples:

        python -m benchmarks tables --table bifurcated-6 --only 8192 --way graph
    """
    names = check_choice("table", table or [], PAPER_TABLES)
    if not names:
        raise InputError(f"no table was named; give --table with one of {', '.join(PAPER_TABLES)}")
    if out.is_file() and not show:
        raise InputError(f"--out must be a folder, {str(out)!r} is a file; name a folder, which gets a file a table")
    cases: dict[str, list[Any]] = {name: chosen(PAPER_TABLES[name].cases, only) for name in names}
    check_device(device)
    ways = {name: way or list(PAPER_TABLES[name].ways) for name in names}
    for name in names:  # what is refused is refused before any is measured
        if _of_operators(name):
            check_choice("way", ways[name], OP_WAY_NAMES)
            if not show:
                check_backend()
        else:
            check_ways(ways[name], WAYS)
            check_enable_options()
        if not show:
            check_out(out / f"{name}.csv")
    place = None if show else find_device(device)
    with exit_on_interrupt():
        for name in names:
            if place is not None and not _of_operators(name):
                check_models(cases[name], device, place)
    for name, setting in ((name, PAPER_TABLES[name]) for name in names):
        typer.echo(f"{name}: {setting.source}\n  {setting.scaled}")
        if place is None:
            show_cases(cases[name])
            continue
        from ..generate.table import generate_table
        from ..ops.table import ops_table

        file = out / f"{name}.csv"
        if _of_operators(name):
            rows = run_ops(cases[name], ways[name], place, check, file)
            shown: Callable[[list[Measurement]], str] = ops_table
        else:
            rows = run_generate(cases[name], ways[name], place, check, repeats, file)
            shown = partial(generate_table, published=setting.published, unit=setting.unit)
        report(rows, file, shown, plot=plot)


def _of_operators(name: str) -> bool:
    return isinstance(PAPER_TABLES[name].cases[0], OpCase)
