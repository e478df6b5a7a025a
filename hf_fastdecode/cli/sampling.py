"""How completions are drawn: the options that `demo` and `generate` share."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from ..errors import CommandError

TEMPERATURE: Final = 0.8
TOP_P: Final = 0.95
SAMPLES: Final = 4
LEAST_TEMPERATURE: Final = 1e-6  # logits divided by much less overflow float32


@dataclass(frozen=True)
class Sampling:
    """Options of one `generate` call.

    Attributes:
        n: Completions of each prompt.
        max_new_tokens: Most tokens in one completion.
        temperature: Divides the logits; at least `LEAST_TEMPERATURE`.
        top_p: Draw from the smallest set of tokens of this probability; 1 is off.
        top_k: Draw from this many most likely tokens; 0 is off.
        greedy: Take the most likely token; temperature, top_p and top_k have no effect then.
        seed: Of torch's random generator.

    Raises:
        CommandError: A value is out of its bounds.
    """

    n: int = SAMPLES
    max_new_tokens: int = 128
    temperature: float = TEMPERATURE
    top_p: float = TOP_P
    top_k: int = 0
    greedy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_positive("n", self.n)
        check_positive("max-new-tokens", self.max_new_tokens)
        if not (self.temperature >= LEAST_TEMPERATURE and math.isfinite(self.temperature)):
            raise CommandError(
                f"--temperature must be at least {LEAST_TEMPERATURE:g} and finite, got {self.temperature:g}; "
                "`hf-fastdecode generate --greedy` takes the most likely tokens"
            )
        if not 0 < self.top_p <= 1:
            raise CommandError(f"--top-p must be above 0 and at most 1, got {self.top_p:g}; 1 turns it off")
        if self.top_k < 0:
            raise CommandError(f"--top-k must be at least 0, got {self.top_k}; 0 turns it off")
        if not 0 <= self.seed < 2**63:
            raise CommandError(f"--seed must be at least 0 and below 2**63, got {self.seed}")
        if self.greedy and self.n > 1:
            raise CommandError(f"greedy completions of a prompt are all equal, got n = {self.n}; use --n 1 or sample")


def check_positive(name: str, *values: int) -> None:
    """Refuse numbers below 1 of an option that counts something.

    Raises:
        CommandError: One of the values is below 1.
    """
    for value in values:
        if value < 1:
            raise CommandError(f"--{name} must be at least 1, got {value}; leave it out for its default")


def sampling_from_options(
    *,
    n: int | None,
    max_new_tokens: int,
    temperature: float | None,
    top_p: float | None,
    top_k: int | None,
    greedy: bool,
    seed: int,
) -> Sampling:
    """The settings from a command line, in which None stands for an option that was not given.

    Raises:
        CommandError: A value is out of its bounds, or an option contradicts ``--greedy``.
    """
    given = {"--temperature": temperature, "--top-p": top_p, "--top-k": top_k}
    if greedy and (clash := [name for name, value in given.items() if value is not None]):
        raise CommandError(f"{clash[0]} {given[clash[0]]:g} has no effect with --greedy; leave one of the two out")
    return Sampling(
        n=n if n is not None else 1 if greedy else SAMPLES,
        max_new_tokens=max_new_tokens,
        temperature=TEMPERATURE if temperature is None else temperature,
        top_p=TOP_P if top_p is None else top_p,
        top_k=top_k or 0,
        greedy=greedy,
        seed=seed,
    )
