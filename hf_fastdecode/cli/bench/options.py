"""Options that the commands of the bench have in common, and what they say of bad input."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

import typer

from ...errors import CommandError
from ..interrupts import exit_on_interrupt

if TYPE_CHECKING:
    import torch

    from ...measurement.runner import Case

C = TypeVar("C", bound="Case")

ONLY = typer.Option(help="Keep cases whose line in --list contains this text; repeat it for more.")
LIST = typer.Option("--list", help="Show the cases and leave.")
CHECK = typer.Option(help="Measure only what the correctness check finds right; --no-check is for debugging.")
PLOT = typer.Option("--plot", help="Also draw pictures beside the rows.")
TREE = typer.Option(
    help="SHARED+PROBLEMSxOWNxSAMPLES, repeatable: tokens that all share, then problems with tokens of their own and "
    "samples of each, such as 2400+8x512x128.",
    show_default="none",
)
DEVICE = typer.Option(help="`auto` (the first GPU, else the CPU), cpu, cuda, cuda:1, ...")


def chosen(cases: Iterable[C], only: Sequence[str] | None) -> list[C]:
    """The cases, each once, of which `only` keeps those that contain one of its texts."""
    found = list(dict.fromkeys(cases))
    if only:
        found = [case for case in found if any(text in _in_words(case) for text in only)]
    if not found:
        raise CommandError(f"no case contains {' or '.join(map(repr, only or []))}; --list without --only shows all")
    return found


def show_cases(cases: Iterable[Case]) -> None:
    """A line for each case, for ``--list``."""
    for case in cases:
        typer.echo(_in_words(case))


def _in_words(case: Case) -> str:
    return "  ".join(f"{name}={value}" for name, value in case.columns().items() if value != "")


def known(what: str, names: Sequence[str], allowed: Iterable[str]) -> list[str]:
    """The names, given with the option `what`, if all are allowed."""
    for name in names:
        if name not in allowed:
            raise CommandError(f"--{what} must be one of {', '.join(allowed)}, got {name!r}")
    return list(dict.fromkeys(names))


def check_dtype(name: str | None) -> None:
    """Refuse a dtype that is not measured; None is the cases' own."""
    if name not in (None, "bfloat16", "float16", "float32"):
        raise CommandError(f"--dtype must be bfloat16, float16 or float32, got {name!r}")


def find_device(name: str) -> torch.device:
    """The device of this name, if it can be measured."""
    with exit_on_interrupt():
        from ..devices import pick_device  # torch, which takes seconds

    device = pick_device(name)
    if device.type not in ("cpu", "cuda"):
        raise CommandError(f"--device must be cpu or a CUDA device, got {name!r}")
    return device
