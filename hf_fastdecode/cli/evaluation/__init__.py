"""The commands of the evaluations: ``hf-fastdecode eval ...``."""

from __future__ import annotations

from ..options import command_group
from . import generate, latency, run, score, stored, workloads

app = command_group()


@app.callback()
def main() -> None:
    """Sample code for programming tasks, score it in a sandbox, and set pass@n and pass@top-m against latency."""


app.add_typer(workloads.app, name="workloads")

for command in (run.run, generate.generate, latency.latency, score.score):
    app.command()(command)
for command in (run.report, score.check, stored.rescore, stored.export):
    app.command()(command)
