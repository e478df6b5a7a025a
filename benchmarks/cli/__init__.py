"""The commands of the bench: ``hf-fastdecode bench ...``."""

from __future__ import annotations

from ..options import command_group
from ..tables import prints_tables
from . import completions, first_calls, generate, ops, parallel, profile, tables

app = command_group()

_NOTE = (
    "A row has the device, versions, commit (`$COMMIT` when it is set), command, and 20th, 50th and 80th percentiles. "
    "Rows that the file already has from the same commit and command are kept: run a command again, and it goes on "
    "where it broke off. Rows from another commit, command or version are replaced when the same case and way is "
    "measured again; name another `--out` to keep them."
)


@app.callback()
def main() -> None:
    """Measure operators, sampling, slim attention and `generate`, ours beside what others do, in one run."""


for command in (
    *(ops.ops, generate.generate, completions.completions, first_calls.first_calls, profile.profile),
    *(ops.sampling, ops.slim, parallel.parallel, tables.tables),
):
    app.command(epilog=_NOTE)(prints_tables(command))
