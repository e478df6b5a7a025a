"""The terminal: one-line errors and exit codes, quiet libraries, progress bars, tables folded to its width."""

from __future__ import annotations

import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from copy import copy
from functools import wraps
from inspect import Parameter
from io import TextIOWrapper
from itertools import groupby, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NoReturn, TextIO

import typer
from tqdm import tqdm
from typer.core import TyperCommand, TyperGroup

from ..errors import InputError, one_line
from ..measurement.rows import markdown
from .interrupts import INTERRUPTED, exit_on_interrupt
from .options import check_choice, parameters_of, with_options

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Column, Table


TRACEBACK_VARIABLE: Final = "HF_FASTDECODE_TRACEBACK"
"""Environment variable that has an error's traceback shown before its line."""

_READER_GONE: Final = 141
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")

# The library's errors name arguments in backticks, with or without a value: `dtype`, `dtype="bfloat16"`, `chat=False`.
_ARGUMENT: Final = re.compile(r"`(\w+)(?:=([^`]*))?`")
_NAMES: Final = (
    "cache_dtype calibration chat data device dtype format limit max_shard_size n new_tokens out plan plot point "
    "points rank resume rope rows sandbox shard shots split task task_ids tokens tolerance tree verify"
)
_OPTIONS: Final = {name: f"--{name.replace('_', '-')}" for name in _NAMES.split()} | {
    "allow_unsafe": "--allow-unsafe-code",
    "prompt_format": "--format",
}
"""The option of each argument that messages name."""


class FailedCheck(Exception):  # noqa: N818 - an outcome of a command, in one line, with exit code 1
    """A check or measurement of a command failed."""


class OneLineErrors(TyperGroup):
    """The commands, with every error in one line on stderr.

    Exit codes: 2 for what the user can set right, 1 for a check that failed and for errors that were not foreseen, 130
    after Ctrl-C, 141 when the reader of stdout went away (as shells count SIGINT and SIGPIPE).
    """

    program = "hf-fastdecode"
    """The first word of each line."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *_: Any, **__: Any) -> NoReturn:
        words = sys.argv[1:] if args is None else list(args)
        try:
            _open_streams()
            with self.make_context(prog_name or self.program, list(words)) as context:
                self.invoke(context)
            code = 0
        except typer.Exit as leaving:
            code = leaving.exit_code
        except (KeyboardInterrupt, Exception) as error:
            code = _report_error(error, words, self.program)
        sys.exit(_flush_stdout(self.program) or code)


class ManyValues(TyperCommand):
    """A command in which ``--n 16 128`` means ``--n 16 --n 128``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Repeat an option before each further number."""
        spread: list[str] = []
        option = ""
        for word in args:
            if word.lstrip("-").isdecimal():
                if option and spread[-1] != option:
                    spread.append(option)
            else:
                option = word if word in ("--context", "--n", "--batch") else ""
            spread.append(word)
        return super().parse_args(ctx, spread)


def in_options(message: str) -> str:
    """The message with options for arguments: ``--dtype bfloat16`` for `dtype="bfloat16"`, ``--no-chat`` for
    `chat=False`. What is no argument there stays as it is."""
    return _ARGUMENT.sub(_option, message)


def _option(match: re.Match[str]) -> str:
    name, value = match.groups()
    if (option := _OPTIONS.get(name)) is None:
        return match[0]
    if value in ("True", "False"):
        return option if value == "True" else f"--no-{option[2:]}"
    return option if value is None else f"{option} {value.strip(chr(34) + chr(39))}"


def note(text: object) -> None:
    """A line on stderr; the command goes on where it cannot be written."""
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:
        _silence(sys.stderr)


def _open_streams() -> None:
    """Open stdin and stderr on /dev/null where they are closed, and let stdout take every letter."""
    closed = [name for name in ("stdin", "stdout", "stderr") if getattr(sys, name) is None]
    for name in closed:
        # The lowest free descriptor is the closed stream's; a file opened later would get what is meant for it.
        null = os.open(os.devnull, os.O_RDONLY if name == "stdin" else os.O_WRONLY)
        setattr(sys, name, os.fdopen(null, "r" if name == "stdin" else "w", encoding="utf-8"))
    if "stdout" in closed:
        raise InputError("stdout is closed; send it to a file, or to /dev/null")
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as Python has it for stderr


def _flush_stdout(program: str) -> int:
    """Flush stdout; returns 0, or the exit code where that fails."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return _report_error(error, [], program)
    return 0


def _silence(stream: TextIO) -> None:
    """Discard buffered output, so that the interpreter's last flush raises nothing."""
    with suppress(OSError), open(os.devnull, "w") as null:
        os.dup2(null.fileno(), stream.fileno())


def _report_error(error: BaseException, words: Sequence[str], program: str) -> int:
    """Write an error in one line on stderr; returns the exit code."""
    if os.environ.get(TRACEBACK_VARIABLE):
        note("".join(traceback.format_exception(error)).rstrip())
    message, code = _line_and_code(error, words)
    if isinstance(error, OSError):
        _silence(sys.stdout)
    if message:
        note(f"{program}: {message}")
    return code


def _line_and_code(error: BaseException, words: Sequence[str]) -> tuple[str, int]:
    if isinstance(error, InputError):
        return in_options(str(error)), 2
    if isinstance(error, FailedCheck):
        return in_options(str(error)), 1
    if isinstance(error, KeyboardInterrupt | typer.Abort):
        return "", INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return "", _READER_GONE
    if isinstance(error, OSError) and error.errno in _FULL:
        return f"cannot write the output: {error.strerror}; free space, or send it elsewhere", 2
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.filename}: {error.strerror}; name another path", 2
    if hasattr(error, "format_message"):  # typer's: an unknown option, a word for a number
        # Without a message no command was named, and the help was shown.
        return _usage_line(error, words) if error.format_message() else "", 2
    name = type(error).__name__
    return f"{name}: {one_line(error)}; with {TRACEBACK_VARIABLE}=1 in the environment, the traceback is shown", 1


def _usage_line(error: Any, words: Sequence[str]) -> str:
    """typer's message about a command line, with the word that it complains about."""
    message = " ".join(error.format_message().split()).rstrip(".")
    names = getattr(getattr(error, "param", None), "opts", [])
    given = [after for name, after in pairwise(words) if name in names]
    given += [word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "hf-fastdecode"
    return f"{message}{f', got {given[-1]!r}' if given else ''}; see {command} --help"


def bytes_text(count: float) -> str:
    """Bytes with three digits or more, in the largest binary unit that leaves one digit before the point."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.{0 if unit == 0 or count >= 100 else 1}f} {_UNITS[unit]}"


@contextmanager
def resumed_by_same_command(path: Path) -> Iterator[None]:
    """Context in which Ctrl-C says that finished work is kept, before it ends the command."""
    try:
        yield
    except KeyboardInterrupt:
        note(f"interrupted: what is done is in {path}; run the same command again to go on where it stopped")
        raise


@contextmanager
def bad_input(containing: str = "") -> Iterator[None]:
    """Within, a ValueError whose message contains a text is one of the user's input."""
    try:
        yield
    except ValueError as error:
        if containing not in str(error):
            raise
        raise InputError(str(error)) from error


def forced_options() -> AbstractContextManager[None]:
    """Within, an option of `enable` that was forced and cannot run ends in one line."""
    return bad_input(" cannot run: ")


@contextmanager
def quiet_libraries(*, warnings: bool = False) -> Iterator[None]:
    """Within, transformers shows no progress bars and, unless `warnings`, no warnings; hf_fastdecode logs none."""
    with exit_on_interrupt():
        from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
        from transformers.utils import logging as transformers_logging

    ours = logging.getLogger("hf_fastdecode")
    level, verbosity = ours.level, transformers_logging.get_verbosity()
    bars, hub_bars = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    ours.setLevel(logging.ERROR)
    transformers_logging.disable_progress_bar()
    if not warnings:
        transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        ours.setLevel(level)
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
            if not hub_bars:
                disable_progress_bars()


@contextmanager
def progress_bar(title: str, steps: int) -> Iterator[Callable[[int], None]]:
    """A function that moves a bar on stderr to the number of steps done; it does nothing if stderr is no terminal."""
    with tqdm(total=steps, desc=title, unit="token", disable=None, leave=False, mininterval=0.25) as bar:

        def on_step(done: int) -> None:
            bar.update(done + 1 - bar.n)

        yield on_step


_FORMATS: Final = ("auto", "text", "markdown")
_chosen: ContextVar[str] = ContextVar("format of tables", default="auto")


def prints_tables(function: Callable[..., None], option: str = "--format") -> Callable[..., None]:
    """A command with an option that says how `show_tables` prints within it."""

    @wraps(function)
    def command(*, table_format: str, **given: Any) -> None:
        check_choice(option.removeprefix("--"), [table_format], _FORMATS)
        if table_format != "auto" and given.get("as_json"):
            raise InputError(f"{option} {table_format} is for tables, and --json prints none; leave one out")
        before = _chosen.set(table_format)
        try:
            function(**given)
        finally:
            _chosen.reset(before)

    help_text = "Tables as `text` that fits the terminal, or as `markdown`; `auto` is what suits the output."
    kind: Any = Annotated[str, typer.Option(option, help=help_text)]
    format_option = Parameter("table_format", Parameter.KEYWORD_ONLY, default="auto", annotation=kind)
    return with_options(command, [*parameters_of(function).values(), format_option])


def show_tables(*found: RenderableType) -> None:
    """Print rich's tables, groups and texts, and strings, whose Markdown tables stay as they are in files."""
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
        free = width - edges - sum(sizes[index][0] + between for index in group)
        for slot, (column, index) in enumerate(zip(piece.columns, group, strict=True)):
            least, most = sizes[index]
            column._index, column.width = slot, least + max(0, min(free, most - least))
            column.overflow, free = "fold", free - column.width + least
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
