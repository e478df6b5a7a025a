"""The commands of the bench: ``hf-fastdecode bench ...``, and ``python -m hf_fastdecode.bench ...`` where the package
is not installed.

torch and transformers take seconds to import, so a command imports what it runs, after its input has been checked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..commands.errors import CommandError
from .generate_cases import DEFAULT_WAYS, WAYS, GenerateCase, PromptTree
from .op_cases import OP_SETS, OpCase, with_dtype
from .paper_tables import PAPER_TABLES
from .sampling_cases import SAMPLING_SETS, SAMPLING_WAYS, SamplingCase

if TYPE_CHECKING:
    import torch

    from .rows import Row

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)

OP_WAY_NAMES = (
    "ours",
    "plain",
    "recipe",
    "hydragen",
    "bifurcated",
    "bifurcated-compiled",
    "ours-prefix",
    "ours-suffix",
)
_COMPILES = "bifurcated-compiled"  # ten seconds a case, so only when it is asked for

_ONLY = typer.Option(help="Keep cases whose row contains this text, such as n128-m8192; repeat it for more.")
_LIST = typer.Option("--list", help="Show the cases and leave.")
_CHECK = typer.Option(help="Measure only what the correctness check finds right; --no-check is for debugging.")
_PLOT = typer.Option("--plot", help="Also draw pictures beside the rows.")
_DEVICE = typer.Option(help="`auto` (the first GPU, else the CPU), cpu, cuda, cuda:1, ...")
_NOTE = (
    "A row has the device, versions, commit (`$COMMIT` where there is no git), command, and 20th, 50th and 80th "
    "percentiles. Rows that the file already has from the same commit and command are kept: run a command again, and "
    "it goes on where it broke off."
)


@app.callback()
def main() -> None:
    """Measure operators, sampling and `generate`, ours beside what others do, in one run."""


@app.command(epilog=_NOTE)
def ops(
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set", help=f"Named set of cases, repeatable: {', '.join(OP_SETS)}.", show_default="small, on a CPU tiny"
        ),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help=f"Repeatable: {', '.join(OP_WAY_NAMES)}.", show_default=f"all but {_COMPILES}"),
    ] = None,
    only: Annotated[list[str] | None, _ONLY] = None,
    dtype: Annotated[str | None, typer.Option(help="bfloat16, float16 or float32.", show_default="the set's")] = None,
    device: Annotated[str, _DEVICE] = "auto",
    check: Annotated[bool, _CHECK] = True,
    plot: Annotated[bool, _PLOT] = False,
    show: Annotated[bool, _LIST] = False,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("runs/ops.csv"),
) -> None:
    """Attention of one decode step: ours against the hardware's floor, PyTorch recipes, plain decode, papers' ports.

    Timed in a CUDA graph over inputs larger than the L2 cache. The floor is the bytes or the arithmetic that the case
    needs, at rates measured in the same run. Each way is first checked against an fp64 reference: its error is at most
    twice that of PyTorch's own attention, or its row says `wrong` and the command ends with exit code 1.

    Examples:

        hf-fastdecode bench ops
        hf-fastdecode bench ops --set h200 --plot --out runs/ops-h200.csv
        hf-fastdecode bench ops --set grid --only n128- --only n1024- --way ours --way recipe
        hf-fastdecode bench ops --set two-level --set ragged --list
    """
    place = _device(device)
    names = sets or ["tiny" if place.type == "cpu" else "small"]
    ways = _known("way", way or [name for name in OP_WAY_NAMES if name != _COMPILES], OP_WAY_NAMES)
    found = [case for name in _known("set", names, OP_SETS) for case in OP_SETS[name]]
    cases = _chosen(with_dtype(found, _dtype(dtype)), only)
    if show:
        return _show(cases)
    _report(_run_ops(cases, ways, place, check, out), out, plot)


@app.command("generate", epilog=_NOTE)
def generate_command(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="Model with random weights, repeatable: 7b-mha, 7b-gqa, 8b-gqa, 13b-mha, tiny; or `embedded`, which "
            "is trained and small.",
            show_default="embedded",
        ),
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="A checkpoint's folder or hub id, repeatable.")] = None,
    point: Annotated[
        list[str] | None,
        typer.Option(
            help="CONTEXTxN: tokens of the prompt and samples of it, repeatable.",
            show_default="512x8, 1024x32, with a tree none",
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help="SHARED+PROBLEMSxOWNxSAMPLES, repeatable: tokens that all share, then problems with tokens of their "
            "own and samples of each, such as 2400+8x512x128.",
            show_default="none",
        ),
    ] = None,
    new_tokens: Annotated[int, typer.Option(help="Tokens drawn for each sample.", min=2)] = 64,
    finish: Annotated[
        int | None,
        typer.Option(
            help="Measure twice: rows that end one after another, from so many tokens on, and all rows to the end."
        ),
    ] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Repeatable: {', '.join(WAYS)}; `graph+sampler=fast` passes options to `enable`.",
            show_default=", ".join(DEFAULT_WAYS),
        ),
    ] = None,
    only: Annotated[list[str] | None, _ONLY] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    device: Annotated[str, _DEVICE] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed runs of each call, at most.", min=1)] = 3,
    check: Annotated[bool, _CHECK] = True,
    plot: Annotated[bool, _PLOT] = False,
    show: Annotated[bool, _LIST] = False,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("runs/generate.csv"),
) -> None:
    """Whole calls of `generate`: first call, time to the first tokens, time of a step, tokens a second, memory.

    A step is `(time(new tokens) - time(1)) / (new tokens - 1)`, so prefill is not in it. The ceilings run the same
    loop with attention left out. A way of ours is measured after its tokens were found to be stock's in float32, and
    its logits as precise as stock's in half precision.

    Examples:

        hf-fastdecode bench generate
        hf-fastdecode bench generate --shape 7b-mha --point 2048x16 --point 8192x128 --plot
        hf-fastdecode bench generate --model codellama/CodeLlama-7b-hf --point 8192x32 --way stock --way compile
        hf-fastdecode bench generate --shape 8b-gqa --point 2048x128 --new-tokens 256 --finish 16 --way shared
        hf-fastdecode bench generate --shape 8b-gqa --tree 800+8x512x128 --way graph --way graph+min_shared_tokens=801

    The last one compares two levels of sharing with one: no run of 801 tokens is common to two problems.
    """
    shapes = [*(shape or []), *(model or [])] or ["embedded"]
    points = [_point(text) for text in (point or ([] if tree else ["512x8", "1024x32"]))]
    if tree and finish is not None and not point:
        raise CommandError("--finish is for --point: rows of a --tree all run to the end")
    finishes = [f"{new_tokens}-{new_tokens}", f"{finish}-{new_tokens}"] if finish is not None else [""]
    ways = way or list(DEFAULT_WAYS)
    _known("way", [name.partition("+")[0] for name in ways], WAYS)
    try:
        cases = _chosen(
            [
                GenerateCase(name, context, n, new_tokens, _dtype(dtype) or dtype, ends)
                for name in shapes
                for context, n in points
                for ends in finishes
            ]
            + [
                PromptTree.parse(text).case(name, new_tokens, _dtype(dtype) or dtype)
                for name in shapes
                for text in tree or []
            ],
            only,
        )
    except ValueError as error:
        raise CommandError(str(error)) from error
    if show:
        return _show(cases)
    _report(_run_generate(cases, ways, _device(device), check, repeats, out), out, plot)


@app.command(epilog=_NOTE)
def sampling(
    sets: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help=f"Named set of cases, repeatable: {', '.join(SAMPLING_SETS)}.",
            show_default="grid, on a CPU tiny",
        ),
    ] = None,
    way: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(SAMPLING_WAYS)}.", show_default="both")
    ] = None,
    only: Annotated[list[str] | None, _ONLY] = None,
    device: Annotated[str, _DEVICE] = "auto",
    check: Annotated[bool, _CHECK] = True,
    show: Annotated[bool, _LIST] = False,
    out: Annotated[Path, typer.Option(help="CSV file to write.")] = Path("runs/sampling.csv"),
) -> None:
    """Drawing the tokens of one step: the sampling kernel beside transformers' own processors.

    The kernel (`fast`) is timed in a CUDA graph over logits larger than the L2 cache; transformers' processors,
    softmax and multinomial (`hf`) as `generate` calls them. The floor is one read of the logits at the copy bandwidth
    measured in the same run. The kernel is first checked: it draws only what transformers leaves, and its
    log-probabilities err at most twice as much as PyTorch's against fp64, or its row says `wrong` and the command ends
    with exit code 1.

    Examples:

        hf-fastdecode bench sampling
        hf-fastdecode bench sampling --only n1024- --way fast
        hf-fastdecode bench sampling --set grid --only top_p0.95 --list
        hf-fastdecode bench sampling --out runs/sampling-h200.csv
    """
    place = _device(device)
    names = _known("set", sets or ["tiny" if place.type == "cpu" else "grid"], SAMPLING_SETS)
    ways = _known("way", way or SAMPLING_WAYS, SAMPLING_WAYS)
    cases = _chosen([case for name in names for case in SAMPLING_SETS[name]], only)
    if show:
        return _show(cases)
    _report(_run_sampling(cases, ways, place, check, out), out, plot=False)


@app.command(epilog=_NOTE)
def tables(
    table: Annotated[
        list[str] | None, typer.Option(help=f"Repeatable: {', '.join(PAPER_TABLES)}.", show_default="none")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All of them; takes hours.")] = False,
    way: Annotated[
        list[str] | None, typer.Option(help="As for `ops` and `generate`.", show_default="the table's")
    ] = None,
    only: Annotated[list[str] | None, _ONLY] = None,
    device: Annotated[str, _DEVICE] = "auto",
    repeats: Annotated[int, typer.Option(help="Timed runs of each call, at most.", min=1)] = 2,
    check: Annotated[bool, _CHECK] = True,
    plot: Annotated[bool, _PLOT] = False,
    show: Annotated[bool, _LIST] = False,
    out: Annotated[Path, typer.Option(help="Folder for a CSV file a table.")] = Path("runs/tables"),
) -> None:
    """The settings of the papers' tables, scaled to one GPU, with the numbers they published beside yours.

    Bifurcated attention: tables 1, 6 and 7. Hydragen: figures 1, 4 and 5, tables 1 and 2.

    Examples:

        hf-fastdecode bench tables --table bifurcated-1 --list
        hf-fastdecode bench tables --table bifurcated-6 --only 8192 --way compile
        hf-fastdecode bench tables --table hydragen-fig5 --plot
    """
    names = list(PAPER_TABLES) if everything else _known("table", table or [], PAPER_TABLES)
    if not names:
        raise CommandError(f"no table was named; give --table with one of {', '.join(PAPER_TABLES)}, or --all")
    for name in names:
        chosen = PAPER_TABLES[name]
        typer.echo(f"{name}: {chosen.source}\n  {chosen.scaled}")
        ways = way or list(chosen.ways)
        file = out / f"{name}.csv"
        first = chosen.cases[0]
        cases: list[Any] = _chosen(list(chosen.cases), only)
        _known("way", [one.partition("+")[0] for one in ways], OP_WAY_NAMES if isinstance(first, OpCase) else WAYS)
        if show:
            _show(cases)
        elif isinstance(first, OpCase):
            _report(_run_ops(cases, ways, _device(device), check, file), file, plot)
        else:
            rows = _run_generate(cases, ways, _device(device), check, repeats, file)
            _report(rows, file, plot, published=(chosen.published, chosen.unit))


def _run_ops(cases: Sequence[OpCase], ways: Sequence[str], device: torch.device, check: bool, out: Path) -> list[Row]:
    from .ops import OpBench
    from .rows import provenance
    from .runner import run

    return run(cases, ways, OpBench(device, check=check).measure, provenance=provenance(device), out=out)


def _run_sampling(
    cases: Sequence[SamplingCase], ways: Sequence[str], device: torch.device, check: bool, out: Path
) -> list[Row]:
    from .rows import provenance
    from .runner import run
    from .sampling import SamplingBench

    return run(cases, ways, SamplingBench(device, check=check).measure, provenance=provenance(device), out=out)


def _run_generate(
    cases: Sequence[GenerateCase], ways: Sequence[str], device: torch.device, check: bool, repeats: int, out: Path
) -> list[Row]:
    from .generate import GenerateBench
    from .generate_ways import find_way
    from .rows import provenance
    from .runner import run

    try:
        for way in ways:
            find_way(way)
    except ValueError as error:
        raise CommandError(str(error)) from error
    bench = GenerateBench(device, repeats=repeats, check=check)
    return run(cases, ways, bench.measure, provenance=provenance(device), out=out)


def _report(
    rows: list[Row], out: Path, plot: bool, published: tuple[dict[tuple[int, int], float], str] | None = None
) -> None:
    """Show the rows as a table, and draw them when that was asked for.

    Raises:
        CommandError: A check was red or something was raised: nothing is reported.
    """
    from .markdown import finish_table, generate_table, ops_table, paper_table
    from .plots import plot as draw
    from .runner import failed
    from .sampling_table import sampling_table

    if red := failed(rows):
        raise CommandError(f"{len(red)} rows of {out} are not right: {red[0]['way']}: {red[0]['status']}", 1)
    if "vocabulary" in rows[0]:
        typer.echo(sampling_table(rows))
    elif "case" in rows[0]:
        typer.echo(ops_table(rows))
    elif published is not None:
        typer.echo(paper_table(rows, *published))
    else:
        typer.echo(generate_table(rows))
        if any(row.get("finish") for row in rows):
            typer.echo(finish_table(rows))
    typer.echo(f"rows: {out}")
    if plot:
        pictures = draw(rows, out.with_suffix(""))
        typer.echo("\n".join(f"picture: {path}" for path in pictures) or "no picture: no two rows make a line")


def _chosen(cases: Iterable[Any], only: Sequence[str] | None) -> list[Any]:
    found = list(dict.fromkeys(cases))
    if only:
        found = [case for case in found if any(text in _in_words(case) for text in only)]
    if not found:
        raise CommandError(f"no case contains {' or '.join(map(repr, only or []))}; --list without --only shows all")
    return found


def _show(cases: Iterable[Any]) -> None:
    for case in cases:
        typer.echo(_in_words(case))


def _in_words(case: OpCase | GenerateCase | SamplingCase) -> str:
    return "  ".join(f"{name}={value}" for name, value in case.columns().items() if value != "")


def _known(what: str, names: Sequence[str], known: Iterable[str]) -> list[str]:
    for name in names:
        if name not in known:
            raise CommandError(f"--{what} must be one of {', '.join(known)}, got {name!r}")
    return list(names)


def _dtype(name: str | None) -> str | None:
    if name not in (None, "bfloat16", "float16", "float32"):
        raise CommandError(f"--dtype must be bfloat16, float16 or float32, got {name!r}")
    return name


def _device(name: str) -> torch.device:
    import torch

    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise CommandError(f"device {name!r} is not available: {str(error).splitlines()[0]}") from error
    return device


def _point(text: str) -> tuple[int, int]:
    context, cross, samples = text.partition("x")
    if not (cross and context.isdigit() and samples.isdigit() and int(context) and int(samples)):
        raise CommandError(f"a point is CONTEXTxN, such as 2048x16, got {text!r}")
    return int(context), int(samples)
