"""``parallel``: decoding over several GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_fastdecode.cli.bench import parse_point
from hf_fastdecode.cli.console import bad_input, note, show_tables
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.cli.options import Repeats, check_choice
from hf_fastdecode.dtypes import parse_dtype
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.rows import check_out, failed
from hf_fastdecode.measurement.shapes import SHAPES

from ..parallel.cases import (
    ATTENTION_WAYS,
    COLLECTIVES,
    FILLS,
    STEP_WAYS,
    AttentionCase,
    StepCase,
    collective_cases,
)
from .options import Check, ListCases, NewTokens, ShapeDtype, measured, repeatable, show_cases

KINDS: dict[str, dict[str, str]] = {"steps": STEP_WAYS, "attention": ATTENTION_WAYS, "collectives": COLLECTIVES}

_WAYS = list(dict.fromkeys(way for ways in KINDS.values() for way in ways))
_START = "torchrun --nproc-per-node 2 -m benchmarks -- parallel"
_POINTS, _POINTS_ON_CPU = ("131072x1", "262144x1"), ("96x2",)


def parallel(
    kind: Annotated[list[str] | None, repeatable(KINDS, "all")] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Shape of the models and of the attention layers, repeatable: {', '.join(SHAPES)}.",
            show_default="8b-gqa, on a CPU tiny",
        ),
    ] = None,
    point: Annotated[
        list[str] | None,
        typer.Option(
            help="CONTEXTxN: tokens of a context, and rows that share it; repeatable.",
            show_default=f"{', '.join(_POINTS)}, on a CPU {_POINTS_ON_CPU[0]}",
        ),
    ] = None,
    way: Annotated[list[str] | None, repeatable(_WAYS, "all of a kind")] = None,
    fill: Annotated[
        str,
        typer.Option(
            help="Keys and values of the contexts of steps: random, which takes no time, or prefill, which computes "
            "them, and measures the first token too."
        ),
    ] = "random",
    new_tokens: NewTokens = 33,
    most_bytes: Annotated[int, typer.Option(help="Largest collective.", min=1 << 14)] = 4 << 20,
    dtype: ShapeDtype = "bfloat16",
    device: Annotated[str, typer.Option(help="`auto` (a GPU for each process, else the CPU), cpu or cuda.")] = "auto",
    repeats: Repeats = 2,
    check: Check = True,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Start nothing: predict tree and ring by a cost model.")
    ] = False,
    nvlink: Annotated[
        str | None,
        typer.Option(help="For --simulate: GB/s each way and microseconds within a node.", show_default="fitted"),
    ] = None,
    infiniband: Annotated[
        str, typer.Option(help="For --simulate: the same of a GPU's link between nodes, which nobody measured here.")
    ] = "50,5",
    show: ListCases = False,
    out: Annotated[Path, typer.Option(help="Folder for a CSV file a kind.")] = Path("runs/parallel"),
) -> None:
    """Decoding over several GPUs: whole steps, attention alone, and collectives alone; or a prediction for more.

    It runs in processes that torchrun starts, one a GPU (on a CPU they communicate by gloo, which is to try it out).
    Without the `--` in front of the command torchrun takes options that begin like its own for these.

    Steps (`--kind steps`) are those of models with random weights. Attention (`--kind attention`) is of the layers of
    a shape in one CUDA graph: each way is first checked against fp64: it errs at most twice as much as PyTorch, or its
    row says `wrong`, and the command ends with exit code 1. What a GPU sends and holds is counted, and stands beside
    the paper's equations. Collectives (`--kind collectives`) are of 16 KiB to 4 MiB.

    Rows are written when they are measured, so that a run that is cut short has those before. Set
    NCCL_GRAPH_MIXING_SUPPORT=0 for captured collectives.

    Examples:

        torchrun --nproc-per-node 2 -m benchmarks -- parallel \\
            --kind steps --point 65536x1 --fill prefill

        torchrun --nproc-per-node 4 -m benchmarks -- parallel \\
            --kind attention --shape 7b-mha --point 196608x16

        python -m benchmarks parallel --simulate --infiniband 100,5
    """
    kinds = check_choice("kind", kind or list(KINDS), KINDS)
    ways = check_choice("way", way or _WAYS, _WAYS)
    kinds = [name for name in kinds if any(one in KINDS[name] for one in ways)]
    if not kinds:
        known = "; ".join(f"{one} has {', '.join(of)}" for one, of in KINDS.items())
        raise InputError(f"--way {' and '.join(way or [])} is not of --kind {' or '.join(kind or [])}; {known}")
    check_choice("fill", [fill], FILLS)
    check_choice("shape", shape or [], SHAPES)
    dtype = parse_dtype(dtype, auto=False)
    if device not in ("auto", "cpu", "cuda"):
        raise InputError(
            f"--device must be auto, cpu or cuda, since each process has a GPU of its own, got {device!r}"
        )
    if out.is_file():
        raise InputError(f"--out must be a folder, {str(out)!r} is a file; name a folder, which gets a file a kind")
    if simulate:
        return _simulate(point, nvlink, infiniband)
    with exit_on_interrupt():
        from ..parallel.processes import device_of_process
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks == 1 and not show:
        raise InputError(
            f"parallel measures 2 or more processes, got 1; start it by `{_START}`, or predict with --simulate"
        )
    import torch

    on_cpu = device == "cpu" or (device == "auto" and not torch.cuda.is_available())
    points = [parse_point(text) for text in point or (_POINTS_ON_CPU if on_cpu else _POINTS)]
    shapes = shape or ["tiny" if on_cpu else "8b-gqa"]
    count = max(2, ranks)
    with bad_input():
        of_kinds: dict[str, Callable[[], Sequence[Any]]] = {
            "steps": lambda: [
                StepCase(one, *at, count, new_tokens, fill, dtype) for one, at in product(shapes, points)
            ],
            "attention": lambda: [_attention_case(one, *at, count, dtype) for one, at in product(shapes, points)],
            "collectives": lambda: collective_cases(count, most=most_bytes),
        }
        cases = {name: of_kinds[name]() for name in kinds}
    if show:
        return show_cases(one for name in kinds for one in cases[name])
    for name in kinds if os.environ.get("RANK", "0") == "0" else ():
        check_out(out / f"{name}.csv")
    with exit_on_interrupt():
        from ..parallel.bench import ParallelBench
        from ..parallel.processes import Processes
        from ..parallel.table import parallel_table
    bench = ParallelBench(Processes(device_of_process(device)), check=check, repeats=repeats)
    if bench.processes.rank:
        bench.follow()
        bench.processes.end()
    found = []
    try:
        for name, own in cases.items():
            file = out / f"{name}.csv"
            rows = measured(own, [one for one in ways if one in KINDS[name]], bench, file)
            show_tables(parallel_table(rows))
            typer.echo(f"rows: {file}")
            found += rows
    finally:
        bench.finish()
    if red := failed(found):
        note(f"{len(red)} rows in {out} are not right: {red[0]['way']}: {red[0]['status']}")
    bench.processes.end(1 if red else 0)


def _attention_case(shape: str, context: int, rows: int, ranks: int, dtype: str) -> AttentionCase:
    fields = SHAPES[shape]
    heads, kv_heads = fields["num_attention_heads"], fields["num_key_value_heads"]
    head_dim = fields.get("head_dim", fields["hidden_size"] // heads)
    return AttentionCase(shape, context, rows, ranks, fields["num_hidden_layers"], heads, kv_heads, head_dim, dtype)


def _simulate(point: list[str] | None, nvlink: str | None, infiniband: str) -> None:
    from ..parallel.cost_model import PAPER_CONTEXTS, PAPER_HEADS, Link, measured_cluster, predictions
    from ..parallel.table import scaling_table

    contexts = sorted({parse_point(text)[0] for text in point}) if point else list(PAPER_CONTEXTS)
    with bad_input():
        cluster = replace(measured_cluster(), between=Link.parse("infiniband", infiniband))
        if nvlink is not None:
            cluster = replace(cluster, within=Link.parse("nvlink", nvlink), pass_s=0.0)
    show_tables(scaling_table(predictions(cluster, PAPER_HEADS, contexts), cluster, PAPER_HEADS))
