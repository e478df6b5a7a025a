"""The commands of the evaluations: ``hf-fastdecode eval ...``."""

from __future__ import annotations

import typer

from .commands.check import check
from .commands.generate import generate
from .commands.latency import latency
from .commands.report import report
from .commands.rescore import rescore
from .commands.run import run
from .commands.score import score

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main() -> None:
    """Sample code for programming tasks, score it in a sandbox, and set pass@n and pass@top-m against latency."""


for command in (run, generate, latency, score, report, check, rescore):
    app.command()(command)
