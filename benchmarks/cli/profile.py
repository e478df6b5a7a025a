"""``profile``: where the time of a first token and of a step goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from hf_fastdecode.cli.bench import measured, parse_point, place_of_calls
from hf_fastdecode.cli.checks import check_choice
from hf_fastdecode.cli.console import bad_input
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.cli.options import CsvFile, Device, Repeats
from hf_fastdecode.dtypes import parse_dtype
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.shapes import SHAPES
from hf_fastdecode.model_names import EMBEDDED

from ..generate.cases import PARTS, WAYS, ProfileCase, PromptTree
from ..generate.cases import GenerateCase as Case
from ..generate.inputs.shapes import INPUT_SHAPES
from .generate import check_models, check_ways
from .options import AllShapes, Checkpoints, ListCases, ShapeDtype, Trees, points
from .report import report, show_cases


def profile(
    shape: AllShapes = None,
    model: Checkpoints = None,
    point: Annotated[list[str] | None, points("512x8", inputs=True)] = None,
    tree: Trees = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens drawn for each sample.", min=2)] = 65,
    way: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable: those of `generate` but generate_batch.", show_default="shared"),
    ] = None,
    dtype: ShapeDtype = "bfloat16",
    device: Device = "auto",
    repeats: Repeats = 3,
    show: ListCases = False,
    out: CsvFile = Path("runs/profile.csv"),
) -> None:
    """Where the time of a first token and of a step goes on the GPU: kernels by what they compute, and pauses.

    A call of one new token is the first token; what a whole call takes longer, over its steps, is a step. Both are
    timed by the clock, then run once more under PyTorch's profiler. What the clock has more than the GPU is busy, it
    waited for the CPU.

    Examples:

        python -m benchmarks profile --shape 7b-mha --point 2048x1 --point 8192x128
        python -m benchmarks profile --shape 7b-mha --tree 1+16x511x8 --way stock \\
            --way shared
    """
    ways = list(dict.fromkeys(way or ("shared",)))
    check_ways(ways, [name for name in WAYS if name != "generate_batch"])
    dtype = parse_dtype(dtype, auto=False)
    check_choice("shape", shape or [], (*SHAPES, *INPUT_SHAPES, EMBEDDED))
    shapes = [*(shape or []), *(model or [])] or [EMBEDDED]
    prompts = [parse_point(text) for text in (point or ([] if tree else ["512x8"]))]
    with bad_input():
        calls = [Case(name, context, n, new_tokens, dtype) for name in shapes for context, n in prompts]
        calls += [PromptTree.parse(text).case(name, new_tokens, dtype) for name in shapes for text in tree or []]
    cases = [ProfileCase(call, part) for call in calls for part in PARTS]
    if show:
        return show_cases(cases)
    place = place_of_calls(device, out)
    if place.type != "cuda":
        raise InputError(
            f"a profile is of a CUDA device, whose kernels it counts, got {place.type}; give --device cuda"
        )
    with exit_on_interrupt():
        from ..generate.profile import ProfileBench
        from ..generate.table import profile_table

    check_models(calls, device, place)
    rows = measured(cases, ways, ProfileBench(place, repeats=repeats).measure, place, out)
    report(rows, out, profile_table, plot=False)
