"""Tables on the terminal, folded to its width, and as Markdown; and the option ``--format`` that chooses."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from copy import copy
from functools import wraps
from inspect import Parameter, Signature, signature
from itertools import groupby
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from ..errors import InputError
from ..measurement.rows import markdown
from .checks import check_choice

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Column, Table

_FORMATS: Final = ("auto", "text", "markdown")
_chosen: ContextVar[str] = ContextVar("format of tables", default="auto")


def prints_tables(function: Callable[..., None], option: str = "--format") -> Callable[..., None]:
    """A command with an option that says how `show_tables` prints within it."""
    hints = get_type_hints(function, include_extras=True)
    own = signature(function).parameters.values()
    parameters = [one.replace(annotation=hints[one.name]) for one in own if one.kind is not Parameter.KEYWORD_ONLY]
    named = [one.replace(annotation=hints[one.name]) for one in own if one.kind is Parameter.KEYWORD_ONLY]
    help_text = "Tables as `text` that fits the terminal, or as `markdown`; `auto` is what suits the output."
    kind: Any = Annotated[str, typer.Option(option, help=help_text)]
    named.append(Parameter("table_format", Parameter.KEYWORD_ONLY, default="auto", annotation=kind))

    @wraps(function)
    def command(*args: Any, table_format: str, **given: Any) -> None:
        check_choice(option.removeprefix("--"), [table_format], _FORMATS)
        if table_format != "auto" and given.get("as_json"):
            raise InputError(f"{option} {table_format} is for tables, and --json prints none; leave one out")
        before = _chosen.set(table_format)
        try:
            function(*args, **given)
        finally:
            _chosen.reset(before)

    vars(command)["__signature__"] = Signature([*parameters, *named])
    command.__annotations__ = {one.name: one.annotation for one in [*parameters, *named]}
    return command


def show_tables(*found: RenderableType) -> None:
    """Print texts, which may hold Markdown tables, and rich's tables, groups and texts.

    Markdown that is not printed to a terminal stays as it is, unless text was asked for.
    """
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    for one in found:
        as_it_is = isinstance(one, str) and not (_chosen.get() == "text" or sys.stdout.isatty())
        for part in [one] if as_it_is else _parts(one):
            if as_it_is:
                typer.echo(part)
            elif _chosen.get() == "markdown":
                typer.echo(_markdown(part))
            else:
                console.print(*_folded(part, console.width), sep="\n")


def _parts(found: Any) -> Iterator[Any]:
    """The tables and texts of something to print, in order."""
    from rich.console import Group

    if isinstance(found, Group):
        for one in found.renderables:
            yield from _parts(one)
    elif isinstance(found, str):
        for is_table, group in groupby(found.splitlines(), lambda line: line.startswith("|")):
            lines = list(group)
            yield _table_of(lines) if is_table else "\n".join(lines)
    else:
        yield found


def _table_of(lines: list[str]) -> Table:
    """A table of rich from one of Markdown."""
    from rich.table import Table

    cells = [re.split(r"(?<!\\)\|", line.strip().removeprefix("|").removesuffix("|")) for line in lines]
    heading, _, *rows = [[cell.strip().replace(r"\|", "|") for cell in line] for line in cells]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for name in heading:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def _markdown(part: Any) -> str:
    from rich.table import Table

    if not isinstance(part, Table):
        return f"{part}\n"
    cells = [[" ".join(str(cell).split()) for cell in column.cells] for column in part.columns]
    rows = list(zip(*cells, strict=True))
    if not part.show_header:  # names and values
        return "\n".join(f"- {': '.join(row)}" for row in rows) + "\n"
    title = f"**{str(part.title).strip()}**\n\n" if part.title else ""
    note = str(part.caption) if part.caption else ""
    return title + markdown([" ".join(str(column.header).split()) for column in part.columns], rows, note)


def _folded(part: Any, width: int) -> Iterator[Any]:
    """The part; a table that is too wide without lines between columns, and if need be as several tables.

    Each of these has the first column, and as many others as fit.
    """
    from rich.table import Table

    if not isinstance(part, Table) or not part.show_header:
        yield part
        return
    sizes = [_widths(column) for column in part.columns]
    between, edges = part.padding[1] + part.padding[3] + (part.box is not None), int(part.box is not None)
    if part.box is not None and sum(least + between for least, _ in sizes) + edges > width:
        part = copy(part)
        part.box, part.padding, part.pad_edge, between, edges = None, (0, 1, 0, 0), False, 1, 0
    groups: list[list[int]] = [[0]]
    for index in range(1, len(sizes)):
        if len(groups[-1]) > 1 and sum(sizes[one][0] + between for one in (*groups[-1], index)) + edges > width:
            groups.append([0])
        groups[-1].append(index)
    for group in groups:
        piece = copy(part)
        piece.columns = [copy(part.columns[index]) for index in group]
        room = width - edges - sum(sizes[index][0] + between for index in group)
        for place, (column, index) in enumerate(zip(piece.columns, group, strict=True)):
            least, most = sizes[index]
            column._index, column.width = place, least + max(0, min(room, most - least))
            column.overflow, room = "fold", room - column.width + least
        piece.title = part.title if group is groups[0] else None
        piece.caption = part.caption if group is groups[-1] else None
        yield piece


def _widths(column: Column) -> tuple[int, int]:
    """Least and most letters of a line: headings break at spaces, numbers not before their units."""
    heading, cells = (
        [line for text in texts for line in str(text).splitlines()] for texts in ([column.header], column.cells)
    )
    words = [word for line in (*heading, *cells) for word in line.split()]
    unbroken = [*heading, *cells] if column.no_wrap else cells if column.justify == "right" else []
    return max(map(len, [*words, *unbroken]), default=1), max(map(len, [*heading, *cells]), default=1)
