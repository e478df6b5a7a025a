"""``bench slim``: one layer's decode step over a slim cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...bench.slim_cases import SLIM_SETS, SLIM_WAYS
from ...measurement.out_file import check_out
from ...measurement.show import show as show_table
from ..checks import check_choice, check_device
from ..interrupts import exit_on_interrupt
from ..options import Check, CsvFile, Device, ListCases, Only, repeatable, sets_of
from .report import chosen, find_device, refuse_red, show_cases


def slim(
    sets: Annotated[list[str] | None, sets_of(SLIM_SETS, "grid")] = None,
    way: Annotated[list[str] | None, repeatable(SLIM_WAYS, "all")] = None,
    config: Annotated[
        list[str] | None,
        typer.Option(help="Launch parameters of the slim kernels that differ, such as tile=32,stages=4; repeatable."),
    ] = None,
    only: Only = None,
    device: Device = "auto",
    check: Check = True,
    show: ListCases = False,
    out: CsvFile = Path("runs/slim.csv"),
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
    check_choice("set", sets or [], SLIM_SETS)
    ways = check_choice("way", way or SLIM_WAYS, SLIM_WAYS)
    ways += [f"{name}:{text}" for text in config or [] for name in ways if name.startswith("slim")]
    check_device(device)
    names = sets or ["tiny" if find_device(device).type == "cpu" else "grid"]
    cases = chosen([case for name in names for case in SLIM_SETS[name]], only)
    if show:
        return show_cases(cases)
    check_out(out)
    place = find_device(device)
    with exit_on_interrupt():
        from ...bench.slim_ops import SlimBench
        from ...bench.slim_table import slim_table
        from ...measurement.rows import provenance
        from ...measurement.runner import run

    rows = run(cases, ways, SlimBench(place, check=check).measure, provenance=provenance(place), out=out)
    show_table(slim_table(rows))  # even if a row failed: of several launch configurations, some may not run
    typer.echo(f"rows: {out}")
    refuse_red(rows, out)
