"""The commands of the evaluations: ``hf-fastdecode eval ...``."""

from __future__ import annotations

import typer

from .check import check
from .export import export
from .generate import generate
from .latency import latency
from .report import report
from .rescore import rescore
from .run import run
from .score import score
from .workloads import app as workloads

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def main() -> None:
    """Sample code for programming tasks, score it in a sandbox, and set pass@n and pass@top-m against latency."""


app.add_typer(workloads, name="workloads")

for command in (run, generate, latency, score, report, check, rescore, export):
    app.command()(command)
