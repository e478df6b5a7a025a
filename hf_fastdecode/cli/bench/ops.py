"""``bench ops``: attention of one decode step."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...attention.torch_operators import BACKEND_VARIABLE
from ...bench.ops.cases import OP_SETS, OpCase, with_dtype
from ...command_options import check_device
from ...errors import CommandError
from ...measurement.runner import check_out
from ..interrupts import exit_on_interrupt
from .options import CHECK, DEVICE, LIST, ONLY, PLOT, check_dtype, chosen, find_device, known, show_cases
from .report import report

if TYPE_CHECKING:
    import torch

    from ...measurement.rows import Measurement

OP_WAY_NAMES = (
    "ours",
    "plain",
    "recipe",
    "hydragen",
    "bifurcated",
    "bifurcated-compiled",
    "flashinfer-decode",
    "flashinfer-cascade",
    "sketch",
    "without-own-nodes",
    "ours-prefix",
    "sketch-prefix",
    "ours-suffix",
    "sketch-suffix",
)
# Compile for ten seconds a case, or minutes the first time, so only when they are asked for.
_COMPILE = ("bifurcated-compiled", "flashinfer-decode", "flashinfer-cascade")


def ops(
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help=f"Named set of cases, repeatable: {', '.join(OP_SETS)}.", show_default="small, on a CPU tiny"
        ),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeatable: {', '.join(OP_WAY_NAMES)}.", show_default=f"all but {', '.join(_COMPILE)}"),
    ] = None,
    only: Annotated[list[str] | None, ONLY] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", show_default="the set's")] = None,
    device: Annotated[str, DEVICE] = "auto",
    check: Annotated[bool, CHECK] = True,
    plot: Annotated[bool, PLOT] = False,
    show: Annotated[bool, LIST] = False,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("runs/ops.csv"),
) -> None:
    """Attention of one decode step: ours against the hardware's floor, PyTorch recipes, plain decode, papers' ports.

    Timed in a CUDA graph over inputs larger than the L2 cache. The floor is the bytes or the arithmetic that the case
    needs, at rates measured in the same run. Each way is first checked against an fp64 reference: its error is at most
    twice that of PyTorch's own attention, or its row says `wrong` and the command ends with exit code 1.

    Ways: `ours` is what the package runs, `ours-prefix` its kernel over the shared context alone, and `ours-suffix`
    what it runs where nothing is shared. `plain` is flash decoding with a copy of the context for each row. `recipe`
    is the faster of PyTorch's flash and cuDNN operators over the shared context, flash over what each row added, and a
    merge. `hydragen` is that paper's two flash calls, `bifurcated` that paper's einsums, `bifurcated-compiled` these
    by torch.compile. `flashinfer-decode` and `flashinfer-cascade` are FlashInfer's wrappers over pages of 16 tokens,
    with the extra `flashinfer`: the first reads the shared context once a row, as servers do that share pages alone,
    the second once; the fastest of their kernels and layouts counts. `sketch` is a first Triton kernel of two launches
    with a fixed split, the better of two, which does not store the new tokens; `sketch-prefix` is its first launch,
    `sketch-suffix` what it does where nothing is shared. `without-own-nodes` is ours with one program for each row and
    KV head over what a row added, however long.

    Sets: `grid` is every number of rows, context, suffix and head layout; `one-row`, `ragged` and `two-level` are what
    they say; `h200` is these four together, of head_dim 128, and `head-dims` has others; `completions` has rows that
    added thousands of tokens; `small` is a handful, `tiny` is for a CPU.

    Examples:

        hf-fastdecode bench ops
        hf-fastdecode bench ops --set h200 --plot --out runs/ops-h200.csv
        hf-fastdecode bench ops --set grid --only n128- --only n1024- --way ours --way recipe
        hf-fastdecode bench ops --set two-level --set ragged --list
    """
    known("set", sets or [], OP_SETS)
    ways = known("way", way or [name for name in OP_WAY_NAMES if name not in _COMPILE], OP_WAY_NAMES)
    check_dtype(dtype)
    check_device(device)
    names = sets or ["tiny" if find_device(device).type == "cpu" else "small"]
    cases = chosen(with_dtype([case for name in names for case in OP_SETS[name]], dtype), only)
    if show:
        return show_cases(cases)
    check_backend()
    check_out(out)
    place = find_device(device)
    from ...bench.ops.table import ops_table

    report(run_ops(cases, ways, place, check, out), out, ops_table, plot=plot)


def run_ops(
    cases: Sequence[OpCase], ways: Sequence[str], device: torch.device, check: bool, out: Path
) -> list[Measurement]:
    """Measure operators into `out`."""
    with exit_on_interrupt():
        from ...bench.ops.measure import OpBench
        from ...measurement.rows import provenance
        from ...measurement.runner import run

    return run(cases, ways, OpBench(device, check=check).measure, provenance=provenance(device), out=out)


def check_backend() -> None:
    """Refuse a backend that the environment forces: it would not be what runs.

    Raises:
        CommandError: ``$HF_FASTDECODE_BACKEND`` is set.
    """
    if (forced := os.environ.get(BACKEND_VARIABLE, "")) not in ("", "auto"):
        raise CommandError(f"${BACKEND_VARIABLE}={forced!r} is for generate; --way says which operators run: unset it")
