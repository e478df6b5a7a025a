"""``bench sampling``: drawing the tokens of one step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...bench.sampling.cases import SAMPLING_SETS, SAMPLING_WAYS
from ...command_options import check_device
from ...measurement.runner import check_out
from ..interrupts import exit_on_interrupt
from .options import CHECK, DEVICE, LIST, ONLY, chosen, find_device, known, show_cases
from .report import report


def sampling(
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help=f"Named set of cases, repeatable: {', '.join(SAMPLING_SETS)}.",
            show_default="grid, on a CPU tiny",
        ),
    ] = None,
    way: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(SAMPLING_WAYS)}.", show_default="both")
    ] = None,
    only: Annotated[list[str] | None, ONLY] = None,
    device: Annotated[str, DEVICE] = "auto",
    check: Annotated[bool, CHECK] = True,
    show: Annotated[bool, LIST] = False,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("runs/sampling.csv"),
) -> None:
    """Drawing the tokens of one step: the sampling kernel beside transformers' own processors.

    The kernel (`fast`) is timed in a CUDA graph over logits larger than the L2 cache; transformers' processors,
    softmax and multinomial (`hf`) as `generate` calls them. The floor is one read of the logits at the copy bandwidth
    measured in the same run. The kernel is first checked: it draws only what transformers leaves, and its
    log-probabilities err at most twice as much as PyTorch's against fp64, or its row says `wrong` and the command ends
    with exit code 1.

    Examples:

        hf-fastdecode bench sampling
        hf-fastdecode bench sampling --only n1024- --way fast
        hf-fastdecode bench sampling --set grid --only top_p0.95 --list
        hf-fastdecode bench sampling --out runs/sampling-h200.csv
    """
    known("set", sets or [], SAMPLING_SETS)
    ways = known("way", way or SAMPLING_WAYS, SAMPLING_WAYS)
    check_device(device)
    names = sets or ["tiny" if find_device(device).type == "cpu" else "grid"]
    cases = chosen([case for name in names for case in SAMPLING_SETS[name]], only)
    if show:
        return show_cases(cases)
    check_out(out)
    place = find_device(device)
    with exit_on_interrupt():
        from ...bench.sampling.measure import SamplingBench
        from ...bench.sampling.table import sampling_table
        from ...measurement.rows import provenance
        from ...measurement.runner import run

    rows = run(cases, ways, SamplingBench(place, check=check).measure, provenance=provenance(place), out=out)
    report(rows, out, sampling_table, plot=False)
