"""``generate``: whole calls of `generate`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hf_fastdecode.attention.torch_operators import backend_of_environment
from hf_fastdecode.cli.bench import check_positions, check_weights, measured, parse_point, place_of_calls
from hf_fastdecode.cli.checks import check_choice
from hf_fastdecode.cli.console import bad_input
from hf_fastdecode.cli.interrupts import exit_on_interrupt
from hf_fastdecode.cli.options import CsvFile, Device, Plot, Repeats
from hf_fastdecode.dtypes import parse_dtype
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.shapes import MAX_POSITIONS, SHAPES, parameters
from hf_fastdecode.model_names import EMBEDDED, load_config, max_positions

from ..generate.cases import DEFAULT_WAYS, WAYS, GenerateCase, PromptTree, parse_way
from ..generate.inputs.shapes import INPUT_SHAPES
from .options import AllShapes, Check, Checkpoints, ListCases, Only, ShapeDtype, Trees, points
from .report import chosen, report, show_cases

if TYPE_CHECKING:
    import torch

    from hf_fastdecode.measurement.rows import Measurement


def generate(
    shape: AllShapes = None,
    model: Checkpoints = None,
    point: Annotated[list[str] | None, points("512x8, 1024x32", inputs=True)] = None,
    tree: Trees = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens drawn for each sample.", min=2)] = 64,
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
    way: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Repeatable: {', '.join(WAYS)}; `graph+sampler=fast` passes options to `enable`.",
            show_default=", ".join(DEFAULT_WAYS),
        ),
    ] = None,
    only: Only = None,
    dtype: ShapeDtype = "bfloat16",
    device: Device = "auto",
    repeats: Repeats = 3,
    check: Check = True,
    plot: Plot = False,
    show: ListCases = False,
    out: CsvFile = Path("runs/generate.csv"),
) -> None:
    """Whole calls of `generate`: first call, time to the first tokens, time of a step, tokens a second, memory.

    A step is `(time(new tokens) - time(1)) / (new tokens - 1)`, so prefill is not in it. A way of ours is measured
    after its tokens were found to be stock's in float32, and its logits as precise as stock's in half precision.

    Ways: `stock` is transformers with its dynamic cache, `stock-static` with its static cache, which it compiles,
    `generate_batch` its continuous batching; `stock-beams` is its beam search, with as many beams as samples,
    `stock-lookup` its prompt lookup for one sample, `stock-hidden-states` its loop with `output_hidden_states`, and
    `beams`, `lookup` and `hidden-states` are the same on an enabled model. `shared` is what `enable(model)` does by
    itself; `eager` and `graph` force a mode. Behind each of these three, `-no-attention` is its ceiling:
    the same loop with attention left out. `eager-bifurcated` and `eager-hydragen` attend as those papers do in our
    loop. `slim-k` and `slim-k+r` are `shared` with slim models of random weights, which store what one row alone
    has as keys, or as keys and V-coordinates, and what rows share as keys and values; `slim-k+mode=graph` forces
    a mode. `stock-slim-k` and `stock-slim-k+r` are `stock` with these models. `quantized-fp8`, `quantized-hqq` (8
    bits) and `quantized-quanto` (4 bits, the most it takes) are `stock` with transformers' quantized cache. Where
    `$HF_FASTDECODE_BACKEND` is set, it forces a backend, and stands in front of a row's command.

    A single row shares nothing: ways whose steps are not captured, such as `eager`, run it only with
    `+reuse_prefix=1000000` behind them: 1 MB, which keeps none of a longer prompt.

    Shapes: `7b-mha` is CodeLlama-7B's (32 layers, 32 heads), `7b-gqa` Mistral-7B's and `8b-gqa` Llama-3.1-8B's (32
    layers, 32 heads over 8 KV heads), `13b-mha` CodeLlama-13B's (40 layers, 40 heads); `tiny` and `tiny-mha`
    have 2 layers. `whisper-large-v3` is given a recording of 30 seconds, which is 1,500 tokens for its decoder, and
    begins a transcript with 4 tokens; its own `generate` runs, and `--point 1500x5 --way stock-beams --way beams` is
    its search with 5 beams, which returns the best. `t5-3b` encodes as many tokens as the context has. `qwen3-vl-2b`
    (Qwen3-VL-2B-Instruct's) is given an image of 1,024 tokens in a text, both of which the context counts.

    Examples:

        python -m benchmarks generate
        python -m benchmarks generate --shape 7b-mha --point 2048x16 \\
            --point 8192x128 --plot
        python -m benchmarks generate --model codellama/CodeLlama-7b-hf \\
            --point 8192x32 --way stock --way graph
        python -m benchmarks generate --shape 8b-gqa --point 2048x128 \\
            --new-tokens 256 --finish 16 --way shared
        python -m benchmarks generate --shape 8b-gqa --point 1024x1024 \\
            --new-tokens 768 --finish-mean 100 --way graph \\
            --way graph+max_rows=256
        python -m benchmarks generate --shape whisper-large-v3 --point 1500x16 \\
            --way stock --way shared
        python -m benchmarks generate --shape qwen3-vl-2b --point 1126x32 \\
            --way stock --way shared
        python -m benchmarks generate --shape 8b-gqa --tree 800+8x512x128 \\
            --way graph --way graph+min_shared_tokens=801

    The one with `--finish-mean` compares rows that all begin at once with rows that wait for places of finished ones;
    the last one compares two levels of sharing with one: no run of 801 tokens is common to two problems.
    """
    shapes = [*(shape or []), *(model or [])] or [EMBEDDED]
    prompts = [parse_point(text) for text in (point or ([] if tree else ["512x8", "1024x32"]))]
    if tree and finish is not None and not point:
        raise InputError("--finish is for --point: rows of a --tree all run to the end")
    if finish is not None and not 1 <= finish <= new_tokens:
        raise InputError(f"--finish must be between 1 and --new-tokens {new_tokens}, got {finish}; lower it")
    if finish_mean is not None and (tree or finish is not None or not 1 <= finish_mean <= new_tokens):
        rest = f"between 1 and --new-tokens {new_tokens}, without --finish and --tree, got {finish_mean}"
        raise InputError(f"--finish-mean must be {rest}")
    finishes = [f"{new_tokens}-{new_tokens}", f"{finish}-{new_tokens}"] if finish is not None else [""]
    finishes = finishes if finish_mean is None else [f"~{finish_mean}"]
    ways = way or list(DEFAULT_WAYS)
    check_ways(ways, WAYS)
    dtype = parse_dtype(dtype, auto=False)
    check_choice("shape", shape or [], (*SHAPES, *INPUT_SHAPES, EMBEDDED))
    with bad_input():
        cases = chosen(
            [
                GenerateCase(name, context, n, new_tokens, dtype, ends)
                for name in shapes
                for context, n in prompts
                for ends in finishes
            ]
            + [PromptTree.parse(text).case(name, new_tokens, dtype) for name in shapes for text in tree or []],
            only,
        )
    if show:
        return show_cases(cases)
    place = place_of_calls(device, out)
    with exit_on_interrupt():
        check_models(cases, device, place)
    rows = run_generate(cases, ways, place, check, repeats, out)
    from ..generate.table import generate_tables

    report(rows, out, generate_tables, plot=plot)


def run_generate(
    cases: Sequence[GenerateCase], ways: Sequence[str], device: torch.device, check: bool, repeats: int, out: Path
) -> list[Measurement]:
    """Measure whole calls into `out`."""
    with exit_on_interrupt():
        from ..generate.measure import GenerateBench
        from ..generate.ways import find_way

    with bad_input():
        for way in ways:  # numbers that options of ways cannot be, which takes torch to know
            find_way(way)
    bench = GenerateBench(device, repeats=repeats, check=check)
    return measured(cases, ways, bench.measure, device, out, backend=backend_of_environment())


def check_ways(ways: Sequence[str], known: Collection[str]) -> None:
    """Refuse ways and options of ways that there are not."""
    check_choice("way", [name.partition("+")[0] for name in ways], known)
    with bad_input():
        for way in ways:
            parse_way(way)


def check_models(cases: Sequence[GenerateCase], device: str, place: torch.device) -> None:
    """Refuse models whose config cannot be read, cases longer than their model, and large shapes on a CPU.

    A large shape runs on a CPU only if that was named as the device, which `place` then is.
    """
    for shape in dict.fromkeys(case.shape for case in cases):
        if shape not in SHAPES and Path(shape).expanduser().is_file():
            raise InputError(f"--model must be a folder or a hub id, {shape!r} is a file; name the folder it is in")
        given = INPUT_SHAPES.get(shape)
        limit = MAX_POSITIONS if shape in SHAPES or given else max_positions(load_config(shape))
        for case in cases:
            if given and case.shape == shape:
                given.given.check(case)
            if case.shape == shape:
                asked = f"--point {case.context}x{case.samples}" if case.tree is None else f"--tree {case.tree}"
                check_positions(asked, case.context, case.new_tokens, limit, shape)
        if place.type == "cpu" and (shape in SHAPES or given):
            check_weights(shape, given.parameters() if given else parameters(shape), device)
