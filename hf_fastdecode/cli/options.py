"""The options that commands share, each defined once with its bounds, and groups of options that are dataclasses.

A command that means something else by an option, or documents it further, redefines it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_type_hints

import typer

from ..assets import Task, embedded_tasks, fewshot_tasks
from ..errors import InputError, one_line
from ..generation.options import Options
from .interrupts import exit_on_interrupt

if TYPE_CHECKING:
    import torch


HELP_NAMES: Final[dict[str, Any]] = {"help_option_names": ["-h", "--help"]}
"""Context settings of the apps."""


def command_group() -> typer.Typer:
    """An app for the commands of one subject, which come after its name."""
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
TEMPERATURE_HELP: Final = "Divides the logits; above 0."
TOP_P_HELP: Final = "Draw from the smallest set of tokens of this probability; 1 is off."
Temperature = Annotated[float, typer.Option(help=TEMPERATURE_HELP)]
TopP = Annotated[float, typer.Option(help=TOP_P_HELP)]
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


def option(default: Any, *names: str, **about: Any) -> Any:
    """A field of a group: an option with typer's arguments, which `expand_option_groups` reads."""
    return field(default=default, metadata={"option": typer.Option(*names, **about)})


@dataclass(frozen=True, kw_only=True)
class EnableOptions:
    stock: Stock = False
    mode: Mode = "auto"
    backend: str = option("auto", help="What attends in a step: auto, triton, flash, cudnn, efficient, cpu or plain.")
    sampler: Sampler = "auto"
    fuse_projections: str = option(
        "auto", help="Compute products of one input together, in captured steps: auto, true or false."
    )
    max_rows: int | None = option(
        None, help="Most completions drawn at once; the others wait.", show_default="all that fit"
    )

    min_saved_tokens: str = option(
        "auto", help="Calls in which sharing saves fewer tokens than this run stock; auto estimates."
    )

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


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Options of drawing in one `generate` call, within bounds."""

    n: int = option(None, help="Completions of each prompt.", show_default=f"{SAMPLES}, with --greedy 1")
    max_new_tokens: MaxNewTokens = 128
    temperature: float = option(None, help=TEMPERATURE_HELP, show_default=f"{TEMPERATURE}")
    top_p: float = option(None, help=TOP_P_HELP, show_default=f"{TOP_P}")
    top_k: int = option(
        None,
        help="Draw from this many most likely tokens. 0 is off; transformers' default is 50, which cuts the "
        "tail without a word.",
        show_default="0",
    )
    greedy: bool = option(False, "--greedy", help="Take the most likely token at each step.")
    seed: Seed = 0

    def __post_init__(self) -> None:
        """Set what is not given to its default; an InputError for a value out of bounds, or against ``--greedy``."""
        defaults = {"n": 1 if self.greedy else SAMPLES, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": 0}
        for name, default in defaults.items():
            if (value := vars(self)[name]) is None:  # as typer gives what is not given
                object.__setattr__(self, name, default)
            elif self.greedy and name != "n":
                option = f"--{name.replace('_', '-')} {value:g}"
                raise InputError(f"{option} has no effect with --greedy; leave one of the two out")
        check_count("n", self.n)
        check_count("max-new-tokens", self.max_new_tokens)
        check_sampling(self.temperature, self.top_p, self.seed, zero_is_greedy=False)
        if self.top_k < 0:
            raise InputError(f"--top-k must be at least 0, got {self.top_k}; 0 turns it off")
        if self.greedy and self.n > 1:
            raise InputError(f"greedy completions of a prompt are all equal, got n = {self.n}; use --n 1 or sample")


def expand_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """A command for typer: its options are the parameters, and the fields of those that are dataclasses, and so on."""
    parameters = parameters_of(function)
    groups = {name: one.annotation for name, one in parameters.items() if is_dataclass(one.annotation)}

    @wraps(function)
    def command(**given: Any) -> None:
        made = {name: _made(kind, given) for name, kind in groups.items()}
        function(**made, **given)

    options: list[Parameter] = []
    for name, parameter in parameters.items():
        options += _options_of(groups[name]) if name in groups else [parameter]
    return with_options(command, options)


def parameters_of(function: Callable[..., None]) -> dict[str, Parameter]:
    """The parameters of a function by name, to be given by name, with the types that their annotations stand for."""
    hints = get_type_hints(function, include_extras=True)
    return {
        name: one.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name])
        for name, one in signature(function).parameters.items()
    }


def with_options(command: Callable[..., None], options: Iterable[Parameter]) -> Callable[..., None]:
    """Give a function a signature of these options, for typer."""
    vars(command)["__signature__"] = found = Signature([*options])
    command.__annotations__ = {name: option.annotation for name, option in found.parameters.items()}
    return command


def _options_of(group: Any) -> Iterator[Parameter]:
    types = get_type_hints(group, include_extras=True)
    for one in fields(group):
        if is_dataclass(kind := types[one.name]):
            yield from _options_of(kind)
            continue
        kind = Annotated[kind, one.metadata["option"]] if "option" in one.metadata else kind
        yield Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=kind)


def _made(group: Any, given: dict[str, Any]) -> Any:
    types = get_type_hints(group, include_extras=True)
    kinds = {one.name: types[one.name] for one in fields(group)}
    return group(**{n: _made(kind, given) if is_dataclass(kind) else given.pop(n) for n, kind in kinds.items()})


LEAST_TEMPERATURE: Final = 1e-6  # logits divided by much less overflow float32
_DEVICES: Final = ("cpu", "cuda", "hpu", "mps", "mtia", "npu", "xla", "xpu")


def check_choice(option: str, given: Iterable[str], known: Collection[str]) -> list[str]:
    for value in (values := list(dict.fromkeys(given))):
        if value not in known:
            raise InputError(f"--{option} must be one of {', '.join(known)}, got {value!r}; choose one")
    return values


def check_enable_options(**given: Any) -> None:
    """Refuse values that `hf_fastdecode.enable` does not take, given as options or by the environment."""
    try:
        Options(**given)
    except ValueError as error:
        text = str(error)
        for name in given:
            text = text.replace(name, name.replace("_", "-"))
        raise InputError(text if text.startswith("$") else f"--{text}") from error


def check_device(name: str) -> None:
    """Refuse names that are no torch device; `pick_device` checks that this machine has it."""
    kind = re.fullmatch(r"([a-z]+)(:\d+)?", name)
    if name != "auto" and (kind is None or kind[1] not in _DEVICES):
        raise InputError(f"there is no device {name!r}; try auto or cpu, or cuda:0 for the first GPU")


def pick_device(name: str) -> torch.device:
    """The device of this name, if it is here; ``auto`` is the first GPU, or else the CPU. Imports torch."""
    with exit_on_interrupt():
        import torch
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("meta"):
        raise InputError(f"device {name!r} holds no data; try auto or cpu")
    check_device(name)
    try:
        torch.empty(0, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise InputError(f"device {name!r} is not available: {one_line(error)}; try auto or cpu") from error
    return torch.device(name)


def check_count(option: str, *values: int) -> None:
    for value in values:
        if value < 1:
            raise InputError(f"--{option} must be at least 1, got {value}; leave it out for its default")


def parse_counts(option: str, text: str) -> list[int]:
    """Whole numbers of at least 1 from ``1,4,16``, rising."""
    parts = split_values(text)
    if wrong := [part for part in parts if not re.fullmatch("0*[1-9][0-9]*", part)]:
        raise InputError(
            f"--{option} must be whole numbers of at least 1 with commas between, got {wrong[0]!r}; such as 1,8,32"
        )
    return sorted(set(map(int, parts)))


def split_values(text: str) -> list[str]:
    return [part.strip() for part in text.split(",")]


def check_sampling(temperature: float, top_p: float, seed: int, *, zero_is_greedy: bool) -> None:
    """Refuse a temperature, top-p or seed out of its bounds; temperature 0 may be greedy."""
    if not (temperature >= LEAST_TEMPERATURE and math.isfinite(temperature)) and not (
        zero_is_greedy and temperature == 0
    ):
        raise InputError(
            f"--temperature must be 0 (greedy) or at least 1e-6 and finite, got {temperature:g}"
            if zero_is_greedy
            else f"--temperature must be at least {LEAST_TEMPERATURE:g} and finite, got {temperature:g}; "
            "`hf-fastdecode generate --greedy` takes the most likely tokens"
        )
    if not 0 < top_p <= 1:
        raise InputError(f"--top-p must be above 0 and at most 1, got {top_p:g}; 1 turns it off")
    if not 0 <= seed < 2**63:
        raise InputError(f"--seed must be at least 0 and below 2**63, got {seed}; leave it out for 0")


def pick_tasks(ids: Sequence[int], shots: int) -> list[Task]:
    """The embedded tasks with these ids; checks the number of shots too."""
    most = len(fewshot_tasks())
    if not 0 <= shots <= most:
        raise InputError(
            f"--shots must be between 0 and {most}, the number of solved examples, got {shots}; leave it out"
        )
    tasks = {task["task_id"]: task for task in embedded_tasks()}
    if unknown := [one for one in ids if one not in tasks]:
        raise InputError(
            f"there is no task {unknown[0]}; the embedded tasks have ids from {min(tasks)} to {max(tasks)}"
        )
    return [tasks[one] for one in ids]
