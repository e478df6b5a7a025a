"""The command line: ``python -m benchmarks``, in a clone."""

from __future__ import annotations

import typer

from hf_fastdecode.cli.console import OneLineErrors, prints_tables
from hf_fastdecode.cli.options import HELP_NAMES

from ..forward.cases import FORWARD_WAYS
from ..generate.cases import WAYS
from ..sampling.cases import SAMPLING_WAYS
from ..slim.cases import SLIM_WAYS
from . import forward, generate, ops, parallel, workloads
from .options import NOTE


class Benchmarks(OneLineErrors):
    program = "benchmarks"


app = typer.Typer(
    cls=Benchmarks,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings=HELP_NAMES,
)


@app.callback()
def main() -> None:
    """Measure operators, sampling, slim attention, passes and `generate`, ours beside what others do, in one run.

    Rows go to `runs/`; those that the documentation cites are in `benchmarks/results/`. `hf-fastdecode bench` alone
    measures stock beside enabled on your model, without a clone.
    """


for command, ways in (
    (ops.ops, ops.OP_WAY_NAMES),
    (generate.generate, WAYS),
    (generate.completions, {}),
    (generate.first_calls, {}),
    (generate.profile, {}),
    (ops.sampling, SAMPLING_WAYS),
    (ops.slim, SLIM_WAYS),
    (parallel.parallel, {f"{way} ({kind})": what for kind, of in parallel.KINDS.items() for way, what in of.items()}),
    (forward.forward, FORWARD_WAYS),
):
    listed = [f"- `{name}`: {what}" for name, what in ways.items()]
    app.command(epilog="\n\n".join([*listed, NOTE]))(prints_tables(command))
app.add_typer(workloads.app, name="workloads")


@app.command()
def summary() -> None:
    """Rewrite the tables and the figures of README and other pages from the committed rows."""
    from ..summary import rewrite_pages

    rewrite_pages()
