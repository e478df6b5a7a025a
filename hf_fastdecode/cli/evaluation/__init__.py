"""The commands of the evaluations: ``hf-fastdecode eval ...``."""

from __future__ import annotations

import typer

from ..console import moved
from ..options import command_group
from ..programs import PASS_ON
from . import generate, stored

app = command_group()


@app.callback()
def main() -> None:
    """Sample code for programming tasks, score it in a sandbox, and set pass@n and pass@top-m against latency."""


for command in (stored.run, generate.generate, generate.latency, stored.score):
    app.command()(command)
for command in (stored.report, stored.check, stored.rescore, stored.export):
    app.command()(command)


@app.command(context_settings=PASS_ON, hidden=True)
def workloads(context: typer.Context) -> None:
    """A group of commands that is one of `python -m benchmarks` now."""
    words = " ".join(["workloads", *context.args[:1]])
    raise moved(f"eval {words}", words)
