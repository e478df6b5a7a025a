"""The commands of the evaluations: ``hf-fastdecode eval ...``."""

from __future__ import annotations

import typer

from ..options import HELP_NAMES
from .generate import generate
from .latency import latency
from .run import report, run
from .score import check, score
from .stored import export, rescore
from .workloads import app as workloads

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings=HELP_NAMES,
)


@app.callback()
def main() -> None:
    """Sample code for programming tasks, score it in a sandbox, and set pass@n and pass@top-m against latency."""


app.add_typer(workloads, name="workloads")

for command in (run, generate, latency, score, report, check, rescore, export):
    app.command()(command)
