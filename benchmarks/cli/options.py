"""The options that the benchmarks' commands share, each defined once, beside those of `hf_fastdecode.cli.options`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

import typer

from hf_fastdecode.measurement.shapes import SHAPES

from ..generate.inputs.shapes import INPUT_SHAPES


def _shapes(names: Iterable[str]) -> Any:
    named = f"Model with random weights, repeatable: {', '.join(names)}"
    return typer.Option(help=f"{named}; or `embedded`, which is trained and small.", show_default="embedded")


Shapes = Annotated[list[str] | None, _shapes(SHAPES)]
AllShapes = Annotated[list[str] | None, _shapes((*SHAPES, *INPUT_SHAPES))]
"""The same with shapes that are given more than token ids."""
Checkpoints = Annotated[list[str] | None, typer.Option(help="A checkpoint's folder or hub id, repeatable.")]
Trees = Annotated[
    list[str] | None,
    typer.Option(
        help="Such as 2400+8x512x128, repeatable: tokens that all share, then how many problems, the tokens of each "
        "one's own, and its samples.",
        show_default="none",
    ),
]
ShapeDtype = Annotated[str, typer.Option(help="float32, bfloat16 or float16; also fp32, bf16 or fp16.")]
Only = Annotated[
    list[str] | None,
    typer.Option(help="Keep cases whose line in --list contains this text; repeat it for more."),
]
Check = Annotated[
    bool, typer.Option(help="Measure only what the correctness check finds right; --no-check is for debugging.")
]
ListCases = Annotated[bool, typer.Option("--list", help="Show the cases and leave.")]


def points(default: str, *, trees: bool = True, inputs: bool = False) -> Any:
    """The option ``--point`` of a command with this default, beside ``--tree`` or alone.

    With `inputs` for shapes that are given more than token ids, too.
    """
    more = " (those of an image among them; with an encoder, the tokens it encodes)" if inputs else ""
    return typer.Option(
        help=f"CONTEXTxN: tokens of the prompt{more} and samples of it, repeatable.",
        show_default=f"{default}, with a tree none" if trees else default,
    )


def sets_of(names: Iterable[str], default: str) -> Any:
    """The option ``--set`` of a command with these sets of cases."""
    return typer.Option(
        "--set", help=f"Named set of cases, repeatable: {', '.join(names)}.", show_default=f"{default}, on a CPU tiny"
    )


def repeatable(names: Iterable[str], default: str) -> Any:
    """An option that may be one or several of these names."""
    return typer.Option(help=f"Repeatable: {', '.join(names)}.", show_default=default)
