"""``first-calls``: the first calls of a fresh process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from hf_fastdecode.cli.bench import measured, parse_point, place_of_calls
from hf_fastdecode.cli.checks import check_choice
from hf_fastdecode.cli.console import bad_input
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.cli.options import CsvFile, Device
from hf_fastdecode.dtypes import parse_dtype
from hf_fastdecode.measurement.shapes import SHAPES
from hf_fastdecode.model_names import EMBEDDED

from ..generate.cases import CACHES, WAYS, FirstCallsCase, GenerateCase
from .generate import check_models, check_ways
from .options import Checkpoints, ListCases, ShapeDtype, Shapes, points
from .report import report, show_cases

_LEFT_OUT = ("generate_batch", "stock-beams", "beams")


def first_calls(
    shape: Shapes = None,
    model: Checkpoints = None,
    point: Annotated[list[str] | None, points("512x8", trees=False)] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens drawn for each sample.", min=2)] = 65,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Repeatable: those of `generate` but {', '.join(_LEFT_OUT)}.",
            show_default="stock, shared",
        ),
    ] = None,
    caches: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Repeatable: {'; '.join(f'{name}, {what}' for name, what in CACHES.items())}.",
            show_default="both",
        ),
    ] = None,
    dtype: ShapeDtype = "bfloat16",
    device: Device = "auto",
    show: ListCases = False,
    out: CsvFile = Path("runs/first-calls.csv"),
) -> None:
    """The first calls of a fresh process, which compile kernels and capture steps, with cold or warm caches on disk.

    Each row is a process of its own (two for warm caches, the first of which fills them), and has the times of its
    calls 1, 2, 3 and 10, then of a first call with half as many samples more, and of one with a context of twice the
    length. Loading the model is not part of them.

    Examples:

        python -m benchmarks first-calls
        python -m benchmarks first-calls --shape 7b-mha --point 2048x16 \\
            --way shared --caches cold
    """
    ways = list(dict.fromkeys(way or ("stock", "shared")))
    check_ways(ways, [name for name in WAYS if name not in _LEFT_OUT])
    dtype = parse_dtype(dtype, auto=False)
    check_choice("shape", shape or [], (*SHAPES, EMBEDDED))
    check_choice("caches", caches or [], CACHES)
    prompts = [parse_point(text) for text in point or ["512x8"]]
    with bad_input():
        calls = [
            GenerateCase(name, context, samples, new_tokens, dtype)
            for name in [*(shape or []), *(model or [])] or [EMBEDDED]
            for context, samples in prompts
        ]
    cases = [FirstCallsCase(call, found) for call in calls for found in dict.fromkeys(caches or CACHES)]
    if show:
        return show_cases(cases)
    place = place_of_calls(device, out)
    with exit_on_interrupt():
        from ..generate.first_calls import FirstCallsBench
        from ..generate.table import first_calls_table

    check_models([replace(call, context=2 * call.context) for call in calls], device, place)
    report(measured(cases, ways, FirstCallsBench(place).measure, place, out), out, first_calls_table, plot=False)
