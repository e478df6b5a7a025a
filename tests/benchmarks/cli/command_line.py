"""``python -m benchmarks`` from the outside, in this process."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from benchmarks.cli import app


def run(*arguments: object) -> Result:
    """A command."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
