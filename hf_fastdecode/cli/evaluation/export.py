"""``eval export``: samples for other tools."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, cast

import typer

from ...errors import CommandError
from ...evals.formats import FORMS, Form, export_samples
from ..console import note
from .option_groups import expand_option_groups
from .options import TaskOptions
from .stored import stored_samples


@expand_option_groups
def export(
    samples: Annotated[Path, typer.Argument(help="A run's folder, or a file with its --task.", exists=True)],
    out: Annotated[Path, typer.Option(help="File to write.", dir_okay=False)],
    tasks: TaskOptions,
    form: Annotated[str, typer.Option(help=f"{', '.join(FORMS)}.")] = "human-eval",
) -> None:
    """Write samples in the form of another tool: human-eval, mxeval, EvalPlus or bigcode-evaluation-harness.

    Examples:

        hf-fastdecode eval export runs/mbpp --form evalplus --out samples.jsonl
    """
    if form not in FORMS:
        raise CommandError(f"--form must be one of {', '.join(FORMS)}, got {form!r}")
    chosen, found = stored_samples(samples, tasks)
    export_samples(out, found, chosen.tasks, cast(Form, form))
    note(f"{len(found):,} samples in {out}")
