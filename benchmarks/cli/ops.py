"""``ops``, ``sampling`` and ``slim``: the kernels of one decode step, over named sets of cases."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_fastdecode.attention.torch_operators import BACKEND_VARIABLE
from hf_fastdecode.cli.bench import find_device, refuse_red
from hf_fastdecode.cli.console import show_tables
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.cli.options import CsvFile, Device, check_choice
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.rows import check_out

from ..ops.cases import OP_SETS
from ..sampling.cases import SAMPLING_SETS, SAMPLING_WAYS
from ..slim.cases import SLIM_SETS, SLIM_WAYS
from .options import Check, ListCases, Only, cases_of_sets, chosen, measured, repeatable, report, sets_of, show_cases

if TYPE_CHECKING:
    import torch


OP_WAY_NAMES = {
    "ours": "what the package runs",
    "plain": "flash decoding with a copy of the context for each row",
    "recipe": "the faster of PyTorch's flash and cuDNN operators over the context, flash over suffixes, a merge",
    "hydragen": "that paper's two flash calls",
    "bifurcated": "that paper's einsums",
    "bifurcated-compiled": "these by torch.compile",
    "flashinfer-decode": "FlashInfer over pages of 16 tokens, the context read once a row, as servers do",
    "flashinfer-cascade": "its cascade wrapper, which reads the context once; the fastest kernels and layout count",
    "fasttree": "that paper's kernels, with `kernel_bench` of its artifact on $PYTHONPATH",
    "sketch": "a first Triton kernel of two launches, the better of two splits; it does not store new tokens",
    "without-own-nodes": "ours with one program for each row and KV head over what a row added, however long",
    "ours-prefix": "our kernel over the shared context alone",
    "sketch-prefix": "the sketch's first launch",
    "ours-suffix": "what the package runs where nothing is shared",
    "sketch-suffix": "what the sketch does where nothing is shared",
}
# Compile for ten seconds a case, or minutes the first time, or are of others, so only when they are asked for.
_COMPILE = ("bifurcated-compiled", "flashinfer-decode", "flashinfer-cascade", "fasttree")


def ops(
    sets: Annotated[list[str] | None, sets_of(OP_SETS, "small")] = None,
    way: Annotated[list[str] | None, repeatable(OP_WAY_NAMES, f"all but {', '.join(_COMPILE)}")] = None,
    only: Only = None,
    device: Device = "auto",
    check: Check = True,
    show: ListCases = False,
    out: CsvFile = Path("runs/ops.csv"),
) -> None:
    """Attention of one decode step: ours against the hardware's floor, PyTorch recipes, plain decode, papers' ports.

    Timed in a CUDA graph over inputs larger than the L2 cache. The floor is the bytes or the arithmetic that the case
    needs, at rates measured in the same run. Each way is first checked against an fp64 reference: its error is at most
    twice that of PyTorch's own attention, or its row says `wrong` and the command ends with exit code 1.

    Sets: `grid` is every number of rows, context, suffix and head layout; `one-row`, `ragged` and `two-level` are what
    they say; `h200` is these four together, of head_dim 128, and `head-dims` has others; `completions` has rows that
    added thousands of tokens; `fasttree` and `pat` are the trees of these papers; `small` is a handful, and `tiny` is
    for a CPU.

    Examples:

        python -m benchmarks ops --set h200 --out runs/ops-h200.csv
        python -m benchmarks ops --set grid --only n128- --only n1024- --way ours \\
            --way recipe
    """
    ways = check_choice("way", way or [name for name in OP_WAY_NAMES if name not in _COMPILE], OP_WAY_NAMES)
    cases = chosen(cases_of_sets(OP_SETS, sets, device, "small"), only)
    if show:
        return show_cases(cases)
    if (forced := os.environ.get(BACKEND_VARIABLE, "")) not in ("", "auto"):  # it would not be what runs
        raise InputError(f"${BACKEND_VARIABLE}={forced!r} is for generate; --way says which operators run: unset it")
    place = _place(device, out)
    with exit_on_interrupt():
        from ..ops.measure import OpBench
        from ..ops.table import ops_table

    report(measured(cases, ways, OpBench(place, check=check), out), out, ops_table)


def _place(device: str, out: Path) -> torch.device:
    check_out(out)
    return find_device(device)


def sampling(
    sets: Annotated[list[str] | None, sets_of(SAMPLING_SETS, "grid")] = None,
    way: Annotated[list[str] | None, repeatable(SAMPLING_WAYS, "both")] = None,
    only: Only = None,
    device: Device = "auto",
    check: Check = True,
    show: ListCases = False,
    out: CsvFile = Path("runs/sampling.csv"),
) -> None:
    """Drawing the tokens of one step: the sampling kernel beside transformers' own processors.

    The kernel (`fast`) is timed in a CUDA graph over logits larger than the L2 cache; transformers' processors,
    softmax and multinomial (`hf`) as `generate` calls them. The floor is one read of the logits at the copy bandwidth
    measured in the same run. The kernel is first checked: it draws only what transformers leaves, and its
    log-probabilities err at most twice as much as PyTorch's against fp64, or its row says `wrong` and the command ends
    with exit code 1.

    Examples:

        python -m benchmarks sampling --only n1024- --way fast
    """
    ways = check_choice("way", way or SAMPLING_WAYS, SAMPLING_WAYS)
    cases = chosen(cases_of_sets(SAMPLING_SETS, sets, device, "grid"), only)
    if show:
        return show_cases(cases)
    place = _place(device, out)
    with exit_on_interrupt():
        from ..sampling.cases import sampling_table
        from ..sampling.measure import SamplingBench

    report(measured(cases, ways, SamplingBench(place, check=check), out), out, sampling_table)


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

    Slim ways are without the product with the matrix from keys to values, and checked against fp64 first: they err at
    most twice as much as fused attention.

    Examples:

        python -m benchmarks slim --only n1- --way slim-k \\
            --config tile=32,stages=4 --config clusters=8
    """
    ways = check_choice("way", way or SLIM_WAYS, SLIM_WAYS)
    ways += [f"{name}:{text}" for text in config or [] for name in ways if name.startswith("slim")]
    cases = chosen(cases_of_sets(SLIM_SETS, sets, device, "grid"), only)
    if show:
        return show_cases(cases)
    place = _place(device, out)
    with exit_on_interrupt():
        from ..slim.cases import slim_table
        from ..slim.measure import SlimBench

    rows = measured(cases, ways, SlimBench(place, check=check), out)
    show_tables(slim_table(rows))  # even if a row failed: of several launch configurations, some may not run
    typer.echo(f"rows: {out}")
    refuse_red(rows, out)
