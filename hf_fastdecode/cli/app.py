"""hf-fastdecode: demo, generate, inspect, convert-checkpoint, eval, bench, lm-eval, serve, run.

torch and transformers take seconds to import, so a command imports what it runs, after its input has been checked.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import typer

from .. import __version__
from .bench import bench
from .console import ManyValues, OneLineErrors, prints_tables
from .convert import convert_checkpoint
from .demo import demo
from .evaluation import app as evaluations
from .generate import generate
from .inspection import inspect
from .options import HELP_NAMES
from .programs import PASS_ON, WORDS, lm_eval, run, serve

app = typer.Typer(
    cls=OneLineErrors,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)

# In the order of the help.
app.command()(demo)
app.command()(generate)
app.command("inspect", cls=ManyValues)(prints_tables(inspect))
app.command("convert-checkpoint")(prints_tables(convert_checkpoint, "--table-format"))
app.command()(bench)
app.command("lm-eval", context_settings=PASS_ON, no_args_is_help=True)(lm_eval)
app.command("serve", context_settings=PASS_ON)(serve)
app.command("run", context_settings=WORDS, no_args_is_help=True)(run)
app.add_typer(evaluations, name="eval")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"hf-fastdecode {__version__} (transformers {_installed('transformers')}, torch {_installed('torch')})")
        raise typer.Exit


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@app.callback(invoke_without_command=True)
def main(
    context: typer.Context,
    show_version: bool = typer.Option(
        False, "--version", callback=_show_version, is_eager=True, help="Show the versions and exit."
    ),
) -> None:
    """Fast decoding for Hugging Face Transformers where many sequences share context.

    Many completions of one prompt read the same keys and values: hf_fastdecode computes, stores and reads them once.

    Start with `hf-fastdecode demo`. In several processes: `torchrun --nproc-per-node 2 -m hf_fastdecode -- COMMAND`.

    Exit codes: 0; 2 for bad input, 1 for a check that failed or an error of ours, each in one line on stderr; 130
    after Ctrl-C; 141 when the reader of stdout went away. With HF_FASTDECODE_TRACEBACK=1 in the environment, errors
    show their tracebacks.
    """
    if context.invoked_subcommand is None:
        print(context.get_help())
