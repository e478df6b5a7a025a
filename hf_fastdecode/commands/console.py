"""The terminal: one-line errors and exit codes, quiet libraries, progress bars."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from ..command_errors import CommandError


class OneLineErrors(TyperGroup):
    """The commands, with every error that a user can set right in one line on stderr.

    Exit codes: 2 for bad input, 130 after Ctrl-C, 1 when the reader of stdout went away.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run, and leave by `SystemExit`."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
            sys.stdout.flush()
        except CommandError as error:
            sys.exit(_tell(error, error.exit_code))
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(130)
        except BrokenPipeError:
            # What is still buffered goes nowhere, so that the interpreter's last flush does not complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        except Exception as error:
            if not hasattr(error, "format_message"):  # typer's own: an unknown option, a word for a number
                raise
            if not error.format_message():  # no command was named, and the help is shown
                sys.exit(2)
            words = list(kwargs.get("args") or (args[0] if args else None) or sys.argv[1:])
            sys.exit(_tell(_usage_line(error, words), 2))
        sys.exit(code if isinstance(code, int) else 0)


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
                option = word if word in ("--context", "--n") else ""
            spread.append(word)
        return super().parse_args(ctx, spread)


def _tell(message: object, code: int) -> int:
    print(f"hf-fastdecode: {message}", file=sys.stderr)
    return code


def _usage_line(error: Any, words: list[str]) -> str:
    """What typer has to say about a command line, with the word that it complains about."""
    message = " ".join(error.format_message().split()).rstrip(".")
    names = getattr(getattr(error, "param", None), "opts", [])
    given = [after for name, after in pairwise(words) if name in names]
    given += [word.partition("=")[2] for word in words if word.partition("=")[0] in names and "=" in word]
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "hf-fastdecode"
    return f"{message}{f', got {given[-1]!r}' if given else ''}; see {command} --help"


def cpu_is_busy() -> bool:
    """Whether other programs have had work for every core over the last minute, and threads are not limited."""
    if "OMP_NUM_THREADS" in os.environ or not hasattr(os, "getloadavg"):
        return False
    return os.getloadavg()[0] >= (os.cpu_count() or 1)


@contextmanager
def quiet_libraries(*, warnings: bool = False) -> Iterator[None]:
    """Within, transformers shows no progress bars and the commands tell what hf_fastdecode logs; undone on leaving.

    Args:
        warnings: Let transformers' warnings through.
    """
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
    """A bar on stderr that is gone at the end; nothing where stderr is not a terminal.

    Args:
        title: What runs.
        steps: How many steps it may have.

    Yields:
        A function that takes the number of steps done.
    """
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Few refreshes: they take time from what is being timed.
    with Progress(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as progress:
        task = progress.add_task(f"{title}: prefill", total=steps)
        yield lambda done: progress.update(task, completed=done + 1, description=f"{title}: tokens")
