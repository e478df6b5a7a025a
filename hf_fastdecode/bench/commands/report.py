"""What a command of the bench shows of the rows that it measured."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ...command_errors import CommandError

if TYPE_CHECKING:
    from ..rows import Row


def report(rows: list[Row], out: Path, table: Callable[[list[Row]], str], *, plot: bool) -> None:
    """Show the rows as a table, and draw them when that was asked for.

    Args:
        rows: What was measured.
        out: The file that they are in.
        table: Makes a table of them.
        plot: Draw them beside the file.

    Raises:
        CommandError: A check was red or something was raised: nothing is reported.
    """
    from ..plots import plot as draw
    from ..runner import failed

    if red := failed(rows):
        raise CommandError(f"{len(red)} rows of {out} are not right: {red[0]['way']}: {red[0]['status']}", 1)
    if rows and all(row["status"].startswith("not run: ") for row in rows):
        raise CommandError(f"nothing was measured: {rows[0]['way']}: {rows[0]['status'].partition(': ')[2]}", 1)
    typer.echo(table(rows))
    typer.echo(f"rows: {out}")
    if plot:
        pictures = draw(rows, out.with_suffix(""))
        typer.echo(
            "\n".join(f"picture: {path}" for path in pictures)
            or "no picture: they need cases that differ in n, or in the context, alone"
        )
