"""``bench slim``: one layer's decode step over a slim cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...bench.slim.cases import SLIM_SETS, SLIM_WAYS
from ...command_options import check_device
from ...measurement.runner import check_out
from ...measurement.tables import show as show_table
from ..interrupts import exit_on_interrupt
from .options import CHECK, DEVICE, LIST, ONLY, chosen, find_device, known, show_cases
from .report import refuse_red


def slim(
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help=f"Named set of cases, repeatable: {', '.join(SLIM_SETS)}.",
            show_default="grid, on a CPU tiny",
        ),
    ] = None,
    way: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(SLIM_WAYS)}.", show_default="all")
    ] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help="Launch parameters of the slim kernels that differ, such as tile=32,stages=4; repeatable."),
    ] = None,
    only: Annotated[list[str] | None, ONLY] = None,
    device: Annotated[str, DEVICE] = "auto",
    check: Annotated[bool, CHECK] = True,
    show: Annotated[bool, LIST] = False,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("runs/slim.csv"),
) -> None:
    """One layer's decode step over a slim cache, beside keys and values of the same tokens.

    `slim-k` caches keys alone, `slim-k+r` an eighth as many V-coordinates too; both without the product with the
    matrix from keys to values. `slim-k-two-launches` is the kernel for GPUs without thread block clusters, which has
    other launch parameters (own_heads, block_t); `slim-k-int8`, `slim-k+r-int8` and `slim-k-fp8` run it over caches in
    8 bits with scales, which it dequantises on chip. `flash` is PyTorch's attention over keys and values, `forest`
    this package's, and `forest-prompt` with the tokens as prompts. The slim kernels are checked against fp64 first:
    they err at most twice as much as fused attention.

    Examples:

        hf-fastdecode bench slim
        hf-fastdecode bench slim --only n1- --way slim-k --config tile=32,stages=4 --config clusters=8
    """
    known("set", sets or [], SLIM_SETS)
    ways = known("way", way or SLIM_WAYS, SLIM_WAYS)
    ways += [f"{name}:{text}" for text in config or [] for name in ways if name.startswith("slim")]
    check_device(device)
    names = sets or ["tiny" if find_device(device).type == "cpu" else "grid"]
    cases = chosen([case for name in names for case in SLIM_SETS[name]], only)
    if show:
        return show_cases(cases)
    check_out(out)
    place = find_device(device)
    with exit_on_interrupt():
        from ...bench.slim.measure import SlimBench
        from ...bench.slim.table import slim_table
        from ...measurement.rows import provenance
        from ...measurement.runner import run

    rows = run(cases, ways, SlimBench(place, check=check).measure, provenance=provenance(place), out=out)
    show_table(slim_table(rows))  # even if a row failed: of several launch configurations, some may not run
    typer.echo(f"rows: {out}")
    refuse_red(rows, out)
