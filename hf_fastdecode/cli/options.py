"""The options that commands share, each defined once, and groups of options that are dataclasses.

A command that means something else by an option, or has more to say about it, defines its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Final, get_type_hints

import typer

from ..errors import InputError
from .checks import check_count, check_enable_options, check_sampling

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

    min_saved_tokens: Annotated[
        str,
        typer.Option(help="Calls in which sharing saves fewer tokens than this run stock; auto estimates."),
    ] = "auto"

    def arguments(self) -> dict[str, Any] | None:
        """Arguments of `enable`, checked; None to run stock."""
        found: dict[str, Any] = {name: value for name, value in vars(self).items() if name != "stock"}
        if self.stock:
            refuse_with_stock(**found)
            return None
        fuse = self.fuse_projections
        found["fuse_projections"] = {"true": True, "false": False}.get(fuse, fuse)
        if self.min_saved_tokens.isdecimal():
            found["min_saved_tokens"] = int(self.min_saved_tokens)
        check_enable_options(**found)
        return found


def refuse_with_stock(**options: str | int | None) -> None:
    """Refuse options of `enable` that were given, where stock transformers runs."""
    for name, value in options.items():
        if value not in ("auto", None):
            option = f"--{name.replace('_', '-')} {value}"
            raise InputError(f"{option} is for hf_fastdecode, and --stock runs without it; leave one out")


SAMPLES: Final = 4


@dataclass(frozen=True)
class Sampling:
    """How one `generate` call draws; a value out of its bounds raises an InputError.

    With `greedy`, temperature, top_p and top_k have no effect; top_p 1 and top_k 0 are off.
    """

    n: int = SAMPLES
    max_new_tokens: int = 128
    temperature: float = TEMPERATURE
    top_p: float = TOP_P
    top_k: int = 0
    greedy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("n", self.n)
        check_count("max-new-tokens", self.max_new_tokens)
        check_sampling(self.temperature, self.top_p, self.seed, zero_is_greedy=False)
        if self.top_k < 0:
            raise InputError(f"--top-k must be at least 0, got {self.top_k}; 0 turns it off")
        if self.greedy and self.n > 1:
            raise InputError(f"greedy completions of a prompt are all equal, got n = {self.n}; use --n 1 or sample")


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """Options of drawing, in which None stands for one that was not given."""

    n: Annotated[int | None, typer.Option(help="Completions of each prompt.", show_default="4, with --greedy 1")] = (
        None
    )
    max_new_tokens: MaxNewTokens = 128
    temperature: Temperature = None
    top_p: TopP = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Draw from this many most likely tokens. 0 is off; transformers' own default is 50, which cuts the "
            "tail without a word.",
            show_default="0",
        ),
    ] = None
    greedy: Annotated[bool, typer.Option("--greedy", help="Take the most likely token at each step.")] = False
    seed: Seed = 0

    def sampling(self) -> Sampling:
        """The settings, with their defaults; an InputError for a value out of bounds, or against ``--greedy``."""
        given = {"--temperature": self.temperature, "--top-p": self.top_p, "--top-k": self.top_k}
        if self.greedy and (clash := [name for name, value in given.items() if value is not None]):
            raise InputError(f"{clash[0]} {given[clash[0]]:g} has no effect with --greedy; leave one of the two out")
        return Sampling(
            n=self.n if self.n is not None else 1 if self.greedy else SAMPLES,
            max_new_tokens=self.max_new_tokens,
            temperature=TEMPERATURE if self.temperature is None else self.temperature,
            top_p=TOP_P if self.top_p is None else self.top_p,
            top_k=self.top_k or 0,
            greedy=self.greedy,
            seed=self.seed,
        )


def expand_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: its options are the parameters, and the fields of those that are dataclasses, and so on."""
    hints = get_type_hints(function, include_extras=True)
    groups = {name: hints[name] for name in signature(function).parameters if is_dataclass(hints[name])}
    options: list[Parameter] = []
    for name, parameter in signature(function).parameters.items():
        own = [parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])]
        options += _options_of(groups[name]) if name in groups else own

    @wraps(function)
    def command(**given: Any) -> None:
        made = {name: _made(kind, given) for name, kind in groups.items()}
        function(**made, **given)

    vars(command)["__signature__"] = Signature(options)
    command.__annotations__ = {option.name: option.annotation for option in options}
    return command


def _options_of(group: Any) -> Iterator[Parameter]:
    types = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if is_dataclass(kind := types[field.name]):
            yield from _options_of(kind)
        else:
            yield Parameter(field.name, Parameter.KEYWORD_ONLY, default=field.default, annotation=kind)


def _made(group: Any, given: dict[str, Any]) -> Any:
    """The group of the given options, which are taken out."""
    types = get_type_hints(group, include_extras=True)
    kinds = {field.name: types[field.name] for field in fields(group)}
    return group(**{n: _made(kind, given) if is_dataclass(kind) else given.pop(n) for n, kind in kinds.items()})
