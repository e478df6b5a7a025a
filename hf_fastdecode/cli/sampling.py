"""How completions are drawn: the options that `demo` and `generate` share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import typer

from ..errors import InputError
from .checks import check_count, check_sampling
from .options import TEMPERATURE, TOP_P, MaxNewTokens, Seed, Temperature, TopP

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
