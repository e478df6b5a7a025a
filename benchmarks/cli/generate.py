"""``generate``, ``completions``, ``first-calls`` and ``profile``: calls of `generate`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_fastdecode.cli.bench import check_positions, check_weights, parse_point, place_of_calls
from hf_fastdecode.cli.console import bad_input
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.cli.options import CsvFile, Device, Repeats, check_choice, parse_counts
from hf_fastdecode.dtypes import parse_dtype
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.shapes import MAX_POSITIONS, SHAPES, parameters
from hf_fastdecode.model_names import EMBEDDED, load_config, max_positions

from ..generate.cases import (
    CACHES,
    DEFAULT_WAYS,
    LOOPS,
    PARTS,
    WAYS,
    FirstCallsCase,
    GenerateCase,
    ProfileCase,
    PromptTree,
    parse_way,
    spans,
)
from ..generate.shapes import INPUT_SHAPES, split_shape
from . import options

if TYPE_CHECKING:
    import torch


def generate(
    shape: options.AllShapes = None,
    point: Annotated[list[str] | None, options.points("512x8, 1024x32", inputs=True)] = None,
    tree: options.Trees = None,
    new_tokens: options.NewTokens = 64,
    finish: Annotated[
        int | None,
        typer.Option(
            help="Measure twice: rows that end one after another, from so many tokens on, and all rows to the end."
        ),
    ] = None,
    finish_mean: Annotated[
        int | None,
        typer.Option(help="Rows end one after another, most of them early: after so many tokens on average."),
    ] = None,
    way: Annotated[list[str] | None, options.repeatable(WAYS, ", ".join(DEFAULT_WAYS))] = None,
    only: options.Only = None,
    dtype: options.ShapeDtype = "bfloat16",
    device: Device = "auto",
    repeats: Repeats = 3,
    warm_up: options.WarmUp = None,
    check: options.Check = True,
    show: options.ListCases = False,
    out: CsvFile = Path("runs/generate.csv"),
) -> None:
    """Whole calls of `generate`: first call, time to the first tokens, time of a step, tokens a second, memory.

    A step is `(time(new tokens) - time(1)) / (new tokens - 1)`, so prefill is not in it. A way of ours is measured
    after its tokens were found to be stock's in float32, and its logits as precise as stock's in half precision.

    `graph+sampler=fast` passes options to `enable`. A single row shares nothing: ways whose steps are not captured,
    such as `eager`, run it only with `+reuse_prefix=1000000` after them: 1 MB, which keeps none of a longer prompt.
    Where `$HF_FASTDECODE_BACKEND` is set, it forces a backend, and stands in front of a row's command.

    `whisper-large-v3` is given a recording of 30 seconds, 1,500 tokens for its decoder, and begins a transcript with 4
    tokens; `t5-3b` encodes as many tokens as the context has; `qwen3-vl-2b` and `gemma3-12b-image` are given an image
    of 1,024 or 256 tokens in a text, both of which the context counts; each prompt of a tree has one of its own. A
    shape such as `8b-gqa:bnb-4bit` has quantized weights; a way is then compared with stock's of the same weights. Of
    mixtures, rows have how many experts a step reads.

    Examples:

        python -m benchmarks generate --shape 7b-mha --point 2048x16 \\
            --point 8192x128
        python -m benchmarks generate --shape 8b-gqa --point 1024x1024 \\
            --new-tokens 768 --finish-mean 100 --way graph \\
            --way graph+max_rows=256
        python -m benchmarks generate --shape whisper-large-v3 --point 1500x16 \\
            --way stock --way shared
        python -m benchmarks generate --shape 8b-gqa --tree 800+8x512x128 \\
            --way graph --way graph+min_shared_tokens=801

    The one with `--finish-mean` compares rows that all begin at once with rows that wait for places of finished ones;
    the last one compares two levels of sharing with one: no run of 801 tokens is common to two problems.
    """
    if tree and finish is not None and not point:
        raise InputError("--finish is for --point: rows of a --tree all run to the end")
    if finish is not None and not 1 <= finish <= new_tokens:
        raise InputError(f"--finish must be between 1 and --new-tokens {new_tokens}, got {finish}; lower it")
    if finish_mean is not None and (tree or finish is not None or not 1 <= finish_mean <= new_tokens):
        rest = f"between 1 and --new-tokens {new_tokens}, without --finish and --tree, got {finish_mean}"
        raise InputError(f"--finish-mean must be {rest}")
    ends = [f"{new_tokens}-{new_tokens}", f"{finish}-{new_tokens}"] if finish is not None else [""]
    ends = ends if finish_mean is None else [f"~{finish_mean}"]
    ways = check_ways(way or DEFAULT_WAYS, WAYS)
    calls = parse_calls(_shapes(shape, INPUT_SHAPES), point, tree, ["512x8", "1024x32"], new_tokens, dtype, ends)
    cases = options.chosen(calls, only)
    if show:
        return options.show_cases(cases)
    place = _place(cases, device, out)
    with exit_on_interrupt():
        from ..generate.measure import GenerateBench
        from ..generate.table import generate_tables

    bench = GenerateBench(place, repeats=repeats, check=check, warm_up=warm_up)
    options.report(options.measured(cases, ways, bench, out), out, generate_tables)


def check_ways(ways: Sequence[str], known: Collection[str]) -> list[str]:
    """The ways, each once; refuses ways and options of ways that there are not."""
    check_choice("way", [name.partition("+")[0] for name in ways], known)
    with bad_input():
        for way in ways:
            parse_way(way)
    return list(dict.fromkeys(ways))


def _place(cases: Sequence[GenerateCase], device: str, out: Path) -> torch.device:
    """The device, once the file of rows, options and models have been checked."""
    place = place_of_calls(device, out)
    with exit_on_interrupt():
        check_models(cases, device, place)
    return place


def check_models(cases: Sequence[GenerateCase], device: str, place: torch.device) -> None:
    """Refuse cases longer than their model, and large shapes on a CPU.

    A large shape runs on a CPU only if that was named as the device, which `place` then is.
    """
    for shape in dict.fromkeys(case.shape for case in cases):
        name, _ = split_shape(shape)
        given = INPUT_SHAPES.get(name)
        limit = MAX_POSITIONS if name in SHAPES or given else max_positions(load_config(name))
        for case in (case for case in cases if case.shape == shape):
            if given:
                given.given.check(case)
            asked = f"--point {case.context}x{case.samples}" if case.tree is None else f"--tree {case.tree}"
            check_positions(asked, case.context, case.new_tokens, limit, shape)
        if place.type == "cpu" and (name in SHAPES or given):
            check_weights(shape, given.parameters() if given else parameters(name), device)


def _shapes(shape: list[str] | None, more: Iterable[str] = ()) -> list[str]:
    """The shapes; the embedded model without any."""
    shapes = shape or [EMBEDDED]
    check_choice("shape", [split_shape(one)[0] for one in shapes], (*SHAPES, *more, EMBEDDED))
    return list(dict.fromkeys(shapes))


def parse_calls(
    shapes: Sequence[str],
    point: list[str] | None,
    tree: list[str] | None,
    default: list[str],
    new_tokens: int,
    dtype: str,
    ends: Sequence[str] = ("",),
) -> list[GenerateCase]:
    """The calls of each shape: of all points, by default `default` where there is no tree, and of all trees."""
    prompts, dtype = [parse_point(text) for text in point or ([] if tree else default)], parse_dtype(dtype, auto=False)
    with bad_input():
        trees = [PromptTree.parse(text) for text in tree or []]
        return [
            *(GenerateCase(name, *at, new_tokens, dtype, end) for name in shapes for at in prompts for end in ends),
            *(one.case(name, new_tokens, dtype) for name in shapes for one in trees),
        ]


_OF_COMPLETIONS = [name for name in WAYS if name.removeprefix("stock-") not in LOOPS]
_OF_FIRST_CALLS = [name for name in WAYS if name not in ("stock-beams", "beams")]


def completions(
    shape: options.Shapes = None,
    point: Annotated[list[str] | None, options.points("256x4")] = None,
    tree: options.Trees = None,
    marks: Annotated[
        str, typer.Option(help="Tokens per sample at which time is taken, separated by commas.")
    ] = "16,256,512,1024",
    way: Annotated[list[str] | None, options.repeatable(_OF_COMPLETIONS, "stock, shared")] = None,
    seconds: Annotated[
        float, typer.Option(help="Cut a way's completions short after so many seconds of decoding.", min=1)
    ] = 120,
    dtype: options.ShapeDtype = "bfloat16",
    device: Device = "auto",
    check: options.Check = True,
    show: options.ListCases = False,
    out: CsvFile = Path("runs/completions.csv"),
) -> None:
    """Time of a step while completions grow: one long call of `generate`, timed at several lengths.

    A row is a span between two marks: the mean over its steps, without prefill and without a pause at its ends. The
    floor of a row is what reading the keys and values of its steps takes, each prompt's once, at the bandwidth of a
    copy. A way that takes longer than `--seconds` is cut short, and has no time for the spans it did not finish.
    Captures and compilations in the middle of a call are part of its steps; the first ones are not.

    Examples:

        python -m benchmarks completions --shape 8b-gqa --point 512x4 \\
            --marks 64,2048,8192,32768 --way graph
        python -m benchmarks completions --shape 7b-mha --tree 64+8x32768x1 \\
            --marks 32,96 --way graph --way slim-k

    The last one has eight prompts that have 64 tokens in common, with one sample of each.
    """
    ways = check_ways(way or ("stock", "shared"), _OF_COMPLETIONS)
    numbers = parse_counts("marks", marks)
    if numbers[-1] < 2:
        raise InputError(f"--marks must end at 2 or more, got {marks!r}; name a later one")
    calls = parse_calls(_shapes(shape), point, tree, ["256x4"], numbers[-1], dtype)
    with bad_input():
        cases = [case for call in calls for case in spans(call, numbers)]
    if show:
        return options.show_cases(cases)
    place = _place(calls, device, out)
    with exit_on_interrupt():
        from ..generate.measure import CompletionBench
        from ..generate.table import completions_table

    rows = options.measured(cases, ways, CompletionBench(place, check=check, budget_s=seconds), out)
    options.report(rows, out, completions_table)


def first_calls(
    shape: options.Shapes = None,
    point: Annotated[list[str] | None, options.points("512x8", trees=False)] = None,
    new_tokens: options.NewTokens = 65,
    way: Annotated[list[str] | None, options.repeatable(_OF_FIRST_CALLS, "stock, shared")] = None,
    dtype: options.ShapeDtype = "bfloat16",
    device: Device = "auto",
    show: options.ListCases = False,
    out: CsvFile = Path("runs/first-calls.csv"),
) -> None:
    """The first calls of a fresh process, which compile kernels and capture steps, with cold or warm caches on disk.

    Each row is a process of its own (two for warm caches, the first of which fills them), and has the times of its
    calls 1, 2, 3 and 10, then of a first call with half as many samples more, and of one with a context of twice the
    length. Loading the model is not part of them.

    Examples:

        python -m benchmarks first-calls --shape 7b-mha --point 2048x16 \\
            --way shared
    """
    ways = check_ways(way or ("stock", "shared"), _OF_FIRST_CALLS)
    calls = parse_calls(_shapes(shape), point, None, ["512x8"], new_tokens, dtype)
    cases = [FirstCallsCase(call, found) for call in calls for found in CACHES]
    if show:
        return options.show_cases(cases)
    place = _place([replace(call, context=2 * call.context) for call in calls], device, out)
    with exit_on_interrupt():
        from ..generate.first_calls import FirstCallsBench
        from ..generate.table import first_calls_table

    options.report(options.measured(cases, ways, FirstCallsBench(place), out), out, first_calls_table)


def profile(
    shape: options.AllShapes = None,
    point: Annotated[list[str] | None, options.points("512x8", inputs=True)] = None,
    tree: options.Trees = None,
    new_tokens: options.NewTokens = 65,
    way: Annotated[list[str] | None, options.repeatable(WAYS, "shared")] = None,
    dtype: options.ShapeDtype = "bfloat16",
    device: Device = "auto",
    repeats: Repeats = 3,
    show: options.ListCases = False,
    out: CsvFile = Path("runs/profile.csv"),
) -> None:
    """Where the time of a first token and of a step goes on the GPU: kernels by what they compute, and pauses.

    A call of one new token is the first token; what a whole call takes longer, over its steps, is a step. Both are
    timed by the clock, then run once more under PyTorch's profiler. What the clock has more than the GPU is busy, it
    waited for the CPU.

    Examples:

        python -m benchmarks profile --shape 7b-mha --point 2048x1 --point 8192x128
    """
    ways = check_ways(way or ("shared",), WAYS)
    calls = parse_calls(_shapes(shape, INPUT_SHAPES), point, tree, ["512x8"], new_tokens, dtype)
    cases = [ProfileCase(call, part) for call in calls for part in PARTS]
    if show:
        return options.show_cases(cases)
    place = _place(calls, device, out)
    if place.type != "cuda":
        raise InputError(
            f"a profile is of a CUDA device, whose kernels it counts, got {place.type}; give --device cuda"
        )
    with exit_on_interrupt():
        from ..generate.profile import ProfileBench
        from ..generate.table import profile_table

    options.report(options.measured(cases, ways, ProfileBench(place, repeats=repeats), out), out, profile_table)
