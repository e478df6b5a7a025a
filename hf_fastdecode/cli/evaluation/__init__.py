"""The commands of the evaluations: ``hf-fastdecode eval ...``."""

from __future__ import annotations

import typer

from ..options import HELP_NAMES
from . import generate, latency, run, score, stored, workloads

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings=HELP_NAMES,
)


@app.callback()
def main() -> None:
    """Sample code for programming tasks, score it in a sandbox, and set pass@n and pass@top-m against latency."""


app.add_typer(workloads.app, name="workloads")

for command in (run.run, generate.generate, latency.latency, score.score):
    app.command()(command)
for command in (run.report, score.check, stored.rescore, stored.export):
    app.command()(command)
