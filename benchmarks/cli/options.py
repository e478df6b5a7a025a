"""Options that the benchmarks' commands share, beside those of `hf_fastdecode.cli.options`, and how they show rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hf_fastdecode.attention.torch_operators import backend_of_environment
from hf_fastdecode.cli.bench import find_device, refuse_red
from hf_fastdecode.cli.console import FailedCheck, show_tables
from hf_fastdecode.cli.options import check_choice, check_device
from hf_fastdecode.errors import InputError
from hf_fastdecode.measurement.rows import C, Case, Measurement, provenance, run
from hf_fastdecode.measurement.shapes import SHAPES

from ..generate.shapes import INPUT_SHAPES, QUANTIZED


def _shapes(names: Iterable[str]) -> Any:
    named = f"Model with random weights, repeatable: {', '.join(names)}"
    quantized = f"With `:{'`, `:'.join(QUANTIZED)}` after it, its weights are quantized."
    trained = "or `embedded`, which is trained and small"
    return typer.Option(help=f"{named}; {trained}. {quantized}", show_default="embedded")


Shapes = Annotated[list[str] | None, _shapes(SHAPES)]
AllShapes = Annotated[list[str] | None, _shapes((*SHAPES, *INPUT_SHAPES))]
"""The same with shapes that are given more than token ids."""
Trees = Annotated[
    list[str] | None,
    typer.Option(
        help="Such as 2400+8x512x128, repeatable: tokens that all share, then how many problems, the tokens of each "
        "one's own, and its samples.",
        show_default="none",
    ),
]
NewTokens = Annotated[int, typer.Option(help="Tokens drawn for each sample.", min=2)]
WarmUp = Annotated[
    int | None, typer.Option(help="Tokens of calls before the timed ones, where all would take long.", min=2)
]
ShapeDtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; also fp32, bf16 or fp16.")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Keep cases whose line in --list contains this text; repeat it for more."),
]
Check = Annotated[
    bool, typer.Option(help="Measure only what the correctness check finds right; --no-check is for debugging.")
]
NOTE = (
    "A row has the device, versions, commit (`$COMMIT` when it is set), command, and 20th, 50th and 80th percentiles. "
    "Rows that the file already has from the same commit and command are kept: run a command again, and it goes on "
    "where it broke off. Rows from another commit, command or version are replaced when the same case and way is "
    "measured again; name another `--out` to keep them."
)

ListCases = Annotated[bool, typer.Option("--list", help="Show the cases and leave.")]


def points(default: str, *, trees: bool = True, inputs: bool = False) -> Any:
    """The option ``--point``, beside ``--tree`` or alone; with `inputs` for shapes that are given more, too."""
    more = " (those of an image among them; with an encoder, the tokens it encodes)" if inputs else ""
    return typer.Option(
        help=f"CONTEXTxN: tokens of the prompt{more} and samples of it, repeatable.",
        show_default=f"{default}, with a tree none" if trees else default,
    )


def sets_of(names: Iterable[str], default: str) -> Any:
    return typer.Option(
        "--set", help=f"Named set of cases, repeatable: {', '.join(names)}.", show_default=f"{default}, on a CPU tiny"
    )


def repeatable(names: Iterable[str], default: str) -> Any:
    return typer.Option(help=f"Repeatable: {', '.join(names)}.", show_default=default)


def chosen(cases: Iterable[C], only: Sequence[str] | None) -> list[C]:
    """The cases, each once, of which `only` keeps those that contain one of its texts."""
    found = list(dict.fromkeys(cases))
    if only:
        found = [case for case in found if any(text in _in_words(case) for text in only)]
    if not found:
        raise InputError(f"no case contains {' or '.join(map(repr, only or []))}; --list without --only shows all")
    return found


def cases_of_sets(known: Mapping[str, Sequence[C]], sets: list[str] | None, device: str, default: str) -> list[C]:
    """The cases of the sets that are named, or of the default for the device."""
    names = check_choice("set", sets or [], known)
    check_device(device)
    names = names or ["tiny" if find_device(device).type == "cpu" else default]
    return [case for name in names for case in known[name]]


def show_cases(cases: Iterable[Case]) -> None:
    """A line for each case, for ``--list``."""
    for case in cases:
        typer.echo(_in_words(case))


def _in_words(case: Case) -> str:
    return "  ".join(f"{name}={value}" for name, value in case.columns().items() if value != "")


def measured(cases: Sequence[Case], ways: Sequence[str], bench: Any, out: Path) -> list[Measurement]:
    """Rows of the cases in all ways, measured by `bench` on its device; see `hf_fastdecode.measurement.rows.run`."""
    where = provenance(bench.device, backend=backend_of_environment())
    return run(cases, ways, bench.measure, provenance=where, out=out)


def report(rows: list[Measurement], out: Path, table: Callable[[list[Measurement]], str]) -> None:
    """Show measurements as a table; raises `FailedCheck` if a check was red."""
    refuse_red(rows, out)
    if rows and all(row["status"].startswith("not run: ") for row in rows):
        raise FailedCheck(f"nothing was measured: {rows[0]['way']}: {rows[0]['status'].partition(': ')[2]}")
    show_tables(table(rows))
    typer.echo(f"rows: {out}")


def report_workload(
    rows: list[Measurement],
    out: Path,
    table: Callable[[Sequence[Measurement]], str],
    draw: Callable[[Sequence[Measurement], Path], Path],
) -> None:
    """Show measurements of a workload as a table and draw them; raises `FailedCheck` if nothing is right."""
    refuse_red(rows, out)
    if all(row["status"] != "ok" for row in rows):
        raise FailedCheck(f"nothing was measured: {rows[0]['way']}: {rows[0]['status']}")
    show_tables(table(rows))
    for row in rows:
        at = f"{row['problems']}x{row['samples']}" if "problems" in row else f"{row['questions']} questions"
        if row["status"] != "ok":
            typer.echo(f"{at}, {row['way']}: {row['status']}")
        elif row.get("correct"):
            typer.echo(f"{at}, {row['way']}: {row['correct']} right")
    typer.echo(f"rows: {out}\npicture: {draw(rows, out.with_suffix('.png'))}")
