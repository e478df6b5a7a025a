"""The commands of the evaluations: ``hf-fastdecode eval ...``."""

from __future__ import annotations

from ..options import command_group
from . import generate, stored

app = command_group()


@app.callback()
def main() -> None:
    """Sample code for programming tasks, score it in a sandbox, and set pass@n and pass@top-m against latency."""


for command in (stored.run, generate.generate, generate.latency, stored.score):
    app.command()(command)
for command in (stored.report, stored.check, stored.rescore, stored.export):
    app.command()(command)
