"""``hf-fastdecode bench``: stock transformers beside the enabled model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..attention.torch_operators import backend_of_environment
from ..errors import InputError
from ..measurement.rows import Measurement, check_out, failed, provenance, run
from ..measurement.shapes import MAX_POSITIONS, parameters
from ..model_names import SHAPE, load_config, max_positions
from . import options
from .console import FailedCheck, note, prints_tables, quiet_libraries, show_tables
from .evaluation.options import ModelOptions
from .interrupts import exit_on_interrupt

if TYPE_CHECKING:
    import torch


@prints_tables
@options.expand_option_groups
def bench(
    model: ModelOptions,
    point: list[str] | None = typer.Option(
        None, help="CONTEXTxN: tokens of the prompt and samples of it, repeatable.", show_default="512x8"
    ),
    new_tokens: int = typer.Option(64, help="Tokens drawn for each sample.", min=2),
    mode: options.Mode = "auto",
    sampler: options.Sampler = "auto",
    repeats: options.Repeats = 3,
    plot: options.Plot = False,
    out: options.CsvFile = Path("runs/bench.csv"),
) -> None:
    """Stock transformers beside `enable(model)`: first call, first token, step, whole call, memory.

    Prompts are random tokens, no token ends a row, and tokens are drawn with temperature 0.8 and top-p 0.95. The first
    call of a way compiles and captures; the other times are of later calls. A step is
    `(time(new tokens) - time(1)) / (new tokens - 1)`, so prefill is not in it. In float32 the same seed must draw
    stock's tokens, or the row says `wrong` and the command ends with exit code 1; in half precision no two kernels
    round alike, and tokens are not compared.

    A row has the device, versions, commit (`$COMMIT` when it is set) and command. Rows that the file already has from
    the same commit and command are kept: run a command again, and it goes on where it broke off.

    Examples:

        hf-fastdecode bench
        hf-fastdecode bench --model MODEL --point 2048x16 --point 2048x64 --plot
        hf-fastdecode bench --model shape:8b-gqa --point 8192x32 --mode graph

    Operators, modes side by side, growing completions, first calls of fresh processes, profiles, several GPUs, and
    passes without a cache are measured by `python -m benchmarks` in a clone of the repository.
    """
    points = [parse_point(text) for text in point or ["512x8"]]
    options.check_enable_options(mode=mode, sampler=sampler)
    target = place_of_calls(model.device, out)
    with exit_on_interrupt():
        _check_size(model, points, new_tokens, target)
        from ..measurement.bench import WAYS, BenchCase, StockBesideEnabled, bench_table, draw_bench
        from .models import load_model
    with quiet_libraries():
        found, _ = load_model(model.model, model.dtype, target, encoders=True)
        dtype = str(found.dtype).removeprefix("torch.")
        cases = [BenchCase(model.model, context, samples, new_tokens, dtype) for context, samples in points]
        measure = StockBesideEnabled(found, {"mode": mode, "sampler": sampler}, repeats=repeats).measure
        where = provenance(target, backend=backend_of_environment())
        rows = run(cases, WAYS, measure, provenance=where, out=out)
    refuse_red(rows, out)
    ours = [row for row in rows if row["way"] == "shared"]
    if all(row["status"] != "ok" for row in ours):
        raise FailedCheck(f"nothing was measured: {ours[0]['status'].removeprefix('not run: ')}")
    show_tables(bench_table(rows))
    typer.echo(f"rows: {out}")
    if plot:
        typer.echo(f"picture: {draw_bench(rows, out.with_suffix('.png'))}")


def parse_point(text: str) -> tuple[int, int]:
    context, cross, samples = text.partition("x")
    if not (cross and context.isdecimal() and samples.isdecimal() and int(context) and int(samples)):
        raise InputError(f"a point is CONTEXTxN, such as 2048x16, got {text!r}; write one so")
    return int(context), int(samples)


def find_device(name: str) -> torch.device:
    """The device of this name, if it can be measured."""
    device = options.pick_device(name)
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device must be cpu or a CUDA device, got {name!r}")
    return device


def place_of_calls(device: str, out: Path) -> torch.device:
    """The device for calls of an enabled model, once their options and the file of rows have been checked."""
    options.check_device(device)
    options.check_enable_options()
    check_out(out)
    return find_device(device)


def _check_size(model: ModelOptions, points: Sequence[tuple[int, int]], new_tokens: int, target: torch.device) -> None:
    """Refuse prompts longer than the model takes, and large shapes on a CPU."""
    shape = model.model.removeprefix(SHAPE) if model.model.startswith(SHAPE) else None
    limit = MAX_POSITIONS if shape else max_positions(load_config(model.model))
    for context, samples in points:
        check_positions(f"--point {context}x{samples}", context, new_tokens, limit, model.model)
    if shape and target.type == "cpu":
        check_weights(shape, parameters(shape), model.device)


def check_positions(asked: str, context: int, new_tokens: int, limit: int | None, model: str) -> None:
    if limit is not None and context + new_tokens > limit:
        raise InputError(
            f"{asked} with {new_tokens} new tokens is longer than the {limit} positions of {model}; ask for a shorter "
            "context or fewer new tokens"
        )


def check_weights(shape: str, weights: int, device: str) -> None:
    """Refuse a large shape on a CPU, unless that was named as the device."""
    if (billions := weights / 1e9) <= 1:
        return
    size = f"{shape}: {billions:.0f} billion random weights on a CPU, where a call takes minutes"
    if device == "auto":
        raise InputError(f"{size}; name a smaller shape, such as tiny or embedded, or pass --device cpu")
    note(f"{size}; tiny and embedded are meant for one")


def refuse_red(rows: Sequence[Measurement], out: Path) -> None:
    """Raise `FailedCheck` if a check was red or something was raised."""
    if red := failed(rows):
        raise FailedCheck(f"{len(red)} rows of {out} are not right: {red[0]['way']}: {red[0]['status']}")
