"""``completions``: time of a step while completions grow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_fastdecode.attention.torch_operators import backend_of_environment
from hf_fastdecode.cli.bench import measured, parse_point, place_of_calls
from hf_fastdecode.cli.checks import check_choice
from hf_fastdecode.cli.console import bad_input
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.cli.options import CsvFile, Device, Plot
from hf_fastdecode.dtypes import parse_dtype
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.shapes import SHAPES
from hf_fastdecode.model_names import EMBEDDED

from ..generate.cases import LOOPS, WAYS, CompletionCase, GenerateCase, PromptTree, spans
from .generate import check_models, check_ways
from .options import Check, Checkpoints, ListCases, ShapeDtype, Shapes, Trees, points
from .report import report, show_cases

_LEFT_OUT = ("generate_batch", *LOOPS, *(f"stock-{name}" for name in LOOPS))


def completions(
    shape: Shapes = None,
    model: Checkpoints = None,
    point: Annotated[list[str] | None, points("256x4")] = None,
    tree: Trees = None,
    marks: Annotated[
        str, typer.Option(help="Tokens per sample at which time is taken, rising, separated by commas.")
    ] = "16,256,512,1024",
    way: Annotated[
        list[str] | None,
        typer.Option(
            help="Repeatable: those of `generate` but generate_batch and other loops.",
            show_default="stock, shared",
        ),
    ] = None,
    seconds: Annotated[
        float, typer.Option(help="Cut a way's completions short after so many seconds of decoding.", min=1)
    ] = 120,
    dtype: ShapeDtype = "bfloat16",
    device: Device = "auto",
    check: Check = True,
    plot: Plot = False,
    show: ListCases = False,
    out: CsvFile = Path("runs/completions.csv"),
) -> None:
    """Time of a step while completions grow: one long call of `generate`, timed at several lengths.

    A row is a span between two marks: the mean over its steps, without prefill and without a pause at its ends. The
    floor of a row is what reading the keys and values of its steps takes, each prompt's once, at the bandwidth of a
    copy. A way that takes longer than `--seconds` is cut short, and has no time for the spans it did not finish.
    Captures and compilations in the middle of a call are part of its steps; the first ones are not.

    Examples:

        python -m benchmarks completions
        python -m benchmarks completions --shape 8b-gqa --point 512x4 \\
            --marks 64,2048,8192,32768 --way graph --plot
        python -m benchmarks completions --shape 7b-mha --point 2048x16 \\
            --marks 2048,6144 --way graph
        python -m benchmarks completions --shape 7b-mha --tree 64+8x32768x1 \\
            --marks 32,96 --way graph --way slim-k

    The last one has eight prompts that have 64 tokens in common, with one sample of each.
    """
    ways = list(dict.fromkeys(way or ("stock", "shared")))
    check_ways(ways, [name for name in WAYS if name not in _LEFT_OUT])
    dtype = parse_dtype(dtype, auto=False)
    check_choice("shape", shape or [], (*SHAPES, EMBEDDED))
    numbers = _marks(marks)
    if numbers[-1] < 2:
        raise InputError(f"--marks must end at 2 or more, got {marks!r}; name a later one")
    prompts = [parse_point(text) for text in (point or ([] if tree else ["256x4"]))]
    cases: list[CompletionCase] = []
    with bad_input():
        trees = [PromptTree.parse(text) for text in tree or []]
        for name in [*(shape or []), *(model or [])] or [EMBEDDED]:
            calls = [GenerateCase(name, context, samples, numbers[-1], dtype) for context, samples in prompts]
            for call in calls + [one.case(name, numbers[-1], dtype) for one in trees]:
                cases += spans(call, numbers)
    if show:
        return show_cases(cases)
    place = place_of_calls(device, out)
    with exit_on_interrupt():
        from ..generate.completions import CompletionBench
        from ..generate.table import completions_table

    check_models([case.call for case in cases], device, place)
    bench = CompletionBench(place, check=check, budget_s=seconds)
    rows = measured(cases, ways, bench.measure, place, out, backend=backend_of_environment())
    report(rows, out, completions_table, plot=plot)


def _marks(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise InputError(
            f"--marks are whole numbers separated by commas, such as 256,2048,6144, got {text!r}; write them so"
        )
    return tuple(map(int, parts))
