"""The options that commands share, each defined once, and groups of options that are dataclasses.

A command that means something else by an option, or has more to say about it, defines its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from ..errors import InputError
from .checks import check_enable_options

HELP_NAMES: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"]}
"""Context settings of the apps."""


def command_group() -> typer.Typer:
    """An app for the commands of one subject, which come behind its name."""
    return typer.Typer(
        add_completion=False, no_args_is_help=True, rich_markup_mode="markdown", context_settings=HELP_NAMES
    )


# Models
MODEL: Final = "`embedded`, a folder, or an id on the Hugging Face Hub; of a model, or of a LoRA adapter."
Model = Annotated[str, typer.Option(help=MODEL)]
Device = Annotated[str, typer.Option(help="`auto` (the first GPU, else the CPU), cpu, cuda, cuda:1, ...")]

# Drawing
TEMPERATURE: Final = 0.8
TOP_P: Final = 0.95
TOP_P_HELP: Final = "Draw from the smallest set of tokens of this probability; 1 is off."
Temperature = Annotated[float | None, typer.Option(help="Divides the logits; above 0.", show_default=str(TEMPERATURE))]
TopP = Annotated[float | None, typer.Option(help=TOP_P_HELP, show_default=str(TOP_P))]
MaxNewTokens = Annotated[int, typer.Option(help="Most tokens in one completion.")]
Seed = Annotated[int, typer.Option(help="Seed of torch's random generator; the same seed draws the same completions.")]
Stock = Annotated[
    bool,
    typer.Option("--stock", help="Run without hf_fastdecode; in float32 the same seed draws the same completions."),
]
Mode = Annotated[str, typer.Option(help="How decode steps run: auto, eager or graph.")]
Sampler = Annotated[str, typer.Option(help="Who draws tokens: auto, hf (transformers, draw for draw) or fast.")]

# Measurements
Repeats = Annotated[int, typer.Option(help="Timed runs of each call, at most.", min=1)]
Plot = Annotated[bool, typer.Option("--plot", help="Also draw pictures beside the rows.")]
CsvFile = Annotated[Path, typer.Option(help="CSV file to write.")]


@dataclass(frozen=True, kw_only=True)
class EnableOptions:
    """Options of `hf_fastdecode.enable`, or to run without it."""

    stock: Stock = False
    mode: Mode = "auto"
    backend: Annotated[
        str, typer.Option(help="What attends in a step: auto, triton, flash, cudnn, efficient, cpu or plain.")
    ] = "auto"
    sampler: Sampler = "auto"
    fuse_projections: Annotated[
        str,
        typer.Option(help="Compute products of one input together, in captured steps: auto, true or false."),
    ] = "auto"
    max_rows: Annotated[
        int | None, typer.Option(help="Most completions drawn at once; the others wait.", show_default="all that fit")
    ] = None

    def arguments(self) -> dict[str, Any] | None:
        """Arguments of `enable`, checked; None to run stock."""
        found: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "stock"}
        if self.stock:
            refuse_with_stock(**found)
            return None
        fuse = self.fuse_projections
        found["fuse_projections"] = {"true": True, "false": False}.get(fuse, fuse)
        check_enable_options(**found)
        return found


def refuse_with_stock(**options: str | int | None) -> None:
    """Refuse options of `enable` that were given, where stock transformers runs."""
    for name, value in options.items():
        if value not in ("auto", None):
            option = f"--{name.replace('_', '-')} {value}"
            raise InputError(f"{option} is for hf_fastdecode, and --stock runs without it; leave one out")


def expand_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """A command for typer whose options are the parameters, and the fields of parameters that are dataclasses."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hints[name] for name in signature(function).parameters if is_dataclass(hints[name])}
    options: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        if name in groups:
            types = get_type_hints(groups[name], include_extras=True)
            options += [
                Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name])
                for field in fields(groups[name])
            ]
        else:
            options.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(function)
    def command(**given: Any) -> None:
        made = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)})
            for name, kind in groups.items()
        }
        function(**made, **given)

    vars(command)["__signature__"] = Signature(options)
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command
