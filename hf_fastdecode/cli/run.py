"""``hf-fastdecode run``: another program in this process, with the models that it loads enabled."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from difflib import get_close_matches
from importlib.metadata import entry_points
from types import TracebackType
from typing import Annotated, Any, Final

import typer

from ..enabled_loading import enabled_loading
from ..errors import InputError
from .options import HELP_NAMES, EnableOptions, expand_option_groups

WORDS: Final[dict[str, Any]] = {"allow_extra_args": True, "allow_interspersed_args": False, **HELP_NAMES}
"""Context settings of the command: what comes behind the program is the program's."""

_SCRIPTS: Final = "console_scripts"


@expand_option_groups
def run(
    context: typer.Context,
    options: EnableOptions,
    program: Annotated[str, typer.Argument(help="A script's path, a command such as `trl`, or with `-m` a module.")],
    module: Annotated[bool, typer.Option("-m", "--module", help="PROGRAM is a module, as in `python -m`.")] = False,
    reuse_prefix: Annotated[
        bool, typer.Option("--reuse-prefix", help="Keep what prompts begin with from call to call, up to 2 GiB.")
    ] = False,
) -> None:
    """Run a Python program with the models that it loads enabled.

    PROGRAM runs in this process as it would alone, with all words behind it. What `from_pretrained` returns, of any
    class that generates, is enabled, which a line on stderr says; at the end of the program that is undone. Python
    processes that the program starts do the same (`trl grpo`, `accelerate launch`), unless they ignore the
    environment. Models that are made otherwise, and engines that do not call `generate`, stay as they are.

    Examples:

        hf-fastdecode run trl grpo --model_name_or_path MODEL ...
        hf-fastdecode run --reuse-prefix script.py --its options
        torchrun --nproc-per-node 2 -m hf_fastdecode -- run -m package.train ...
    """
    arguments = options.arguments()
    start = _module(program) if module else _command(program)
    with ExitStack() as held:
        if arguments is not None:
            held.enter_context(enabled_loading(**arguments, reuse_prefix=reuse_prefix))
        elif reuse_prefix:
            raise InputError("--reuse-prefix is for hf_fastdecode, and --stock runs without it; leave one out")
        held.callback(setattr, sys, "argv", sys.argv)
        sys.argv = [program, *context.args]
        try:
            code = start()
        except Exception as error:
            error.__traceback__ = _of_program(error.__traceback__)
            traceback.print_exception(error)
            code = 1
    sys.exit(code)


def _module(name: str) -> Callable[[], Any]:
    sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # of its parent
        found = None
    if found is None:
        raise InputError(f"there is no module {name!r} in {sys.prefix} or the current folder; install it, or check it")
    return lambda: _ended(runpy.run_module(name, run_name="__main__", alter_sys=True))


def _command(program: str) -> Callable[[], Any]:
    """A command of a package, or else a script."""
    names = {point.name: point for point in entry_points(group=_SCRIPTS)}
    if os.sep not in program and not program.endswith(".py") and (point := names.get(program)) is not None:
        sys.path.insert(0, os.path.join(sys.prefix, "bin"))  # as the command's own file has it
        return lambda: point.load()()
    if os.path.isfile(program):
        path = os.path.abspath(program)  # as Python's own `__file__` of a script
        sys.path.insert(0, os.path.dirname(path))
        return lambda: _ended(runpy.run_path(path, run_name="__main__"))
    near = "".join(f"; did you mean {name!r}?" for name in get_close_matches(program, names, 1))
    raise InputError(
        f"{program!r} is neither a file nor a command of a package in {sys.prefix}; a module is named behind -m{near}"
    )


def _ended(_: dict[str, Any]) -> int:
    return 0


def _of_program(trace: TracebackType | None) -> TracebackType | None:
    """The frames of the program, without those that started it."""
    ours = {__file__, runpy.__file__, "<frozen runpy>"}
    found = trace
    while found is not None and found.tb_frame.f_code.co_filename in ours:
        found = found.tb_next
    return found or trace
