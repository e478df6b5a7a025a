"""Tokens that a model predicts with a cache, compared with those that it predicts in fp32.

Predictions are of two kinds. Forced ones are at every position of a given text, whatever was predicted before. Greedy
ones continue a prompt, so that after the first other token the texts differ.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from hf_fastdecode.conversion.fit.value_coordinates import rounded, solve_key_to_value

from .pages import replace_table

TOKENS: Final = 1000
"""Positions of forced predictions, and the fewest greedy tokens."""

EXACT: Final = "keys and values, fp32"
"""Name of the cache that others are compared with."""

_AT_ONCE: Final = 100  # positions


@dataclass(frozen=True)
class Predictions:
    """Predictions of a model with a cache.

    Attributes:
        forced: Logits at each position of given texts, ``[positions, vocabulary]``.
        greedy: Continuations of prompts, each without the token that ends it.
    """

    forced: Tensor
    greedy: list[list[int]]


Caches = Mapping[str, Callable[[], Predictions]]
"""Name of a cache -> makes the predictions; one of them is `EXACT`."""


@dataclass(frozen=True)
class TokensRow:
    """Comparison of the predictions with a cache and those in fp32.

    Attributes:
        name: What is cached.
        forced: Positions, and at how many of them the most likely token is the same.
        divergence: Mean Kullback-Leibler divergence of the forced predictions, in nats.
        greedy: Tokens of the continuations in fp32, and how many have the same token at their place.
        continuations: How many there are, and how many are the same from beginning to end.
    """

    name: str
    forced: tuple[int, int]
    divergence: float
    greedy: tuple[int, int]
    continuations: tuple[int, int]

    def line(self) -> str:
        """A line of the table."""
        forced, greedy = (same / count for count, same in (self.forced, self.greedy))
        return f"| {self.name} | {forced:.1%} | {self.divergence:.0e} | {greedy:.1%} | {self.continuations[1]} |"


def compare(name: str, found: Predictions, exact: Predictions) -> TokensRow:
    """Compare the predictions with a cache with those in fp32, of the same texts and prompts."""
    agree, divergence = 0, 0.0
    for own, oracle in zip(found.forced.split(_AT_ONCE), exact.forced.split(_AT_ONCE), strict=True):
        agree += int((own.argmax(-1) == oracle.argmax(-1)).sum())
        own, oracle = (logits.double().log_softmax(-1) for logits in (own, oracle))
        divergence += (oracle.exp() * (oracle - own)).sum().item()
    pairs = list(zip(found.greedy, exact.greedy, strict=True))
    positions = len(exact.forced)
    return TokensRow(
        name,
        (positions, agree),
        divergence / positions,
        (sum(len(oracle) for _, oracle in pairs), sum(a == b for pair in pairs for a, b in zip(*pair))),
        (len(pairs), sum(own == oracle for own, oracle in pairs)),
    )


def rows(caches: Caches, names: Collection[str] | None = None) -> list[TokensRow]:
    """A row for each cache but `EXACT`, or for those named."""
    exact = caches[EXACT]()
    return [
        compare(name, predict(), exact)
        for name, predict in caches.items()
        if name != EXACT and (names is None or name in names)
    ]


def table(found: Collection[TokensRow]) -> str:
    """The rows in Markdown, all of the same texts and prompts."""
    (row, *_) = found
    head = (
        "cache",
        f"same of {row.forced[0]:,} forced tokens",
        "divergence",
        f"same of {row.greedy[0]:,} greedy tokens",
        f"same of {row.continuations[0]} greedy texts",
    )
    lines = (f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(row.line() for row in found))
    return "\n".join(lines) + "\n"


def write_table(page: Path, tool: str, caches: Caches) -> None:
    """Measure all caches, and write the table of a tool into a page."""
    measured = table(rows(caches))
    replace_table(page, tool, measured)
    print(measured)


def before_end(generated: Tensor, end: int) -> list[list[int]]:
    """Generated ids, ``[rows, tokens]``, each row up to its first `end`."""
    return [row[: row.index(end)] if end in row else row for row in generated.tolist()]


@contextmanager
def rounded_inputs(projections: Iterable[nn.Module], dtype: torch.dtype, group: int) -> Iterator[None]:
    """Round what projections of keys and values read, as a cache of the layers' inputs does.

    It serves with RoPE too, where such a cache would have to rotate the keys of all tokens at every step.

    Args:
        projections: Of keys and values; those of queries read their inputs unrounded.
        dtype: Of the cache.
        group: Numbers that share a scale in 8 bits.
    """

    def read_rounded(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return (rounded(args[0], dtype, group).to(args[0].dtype), *args[1:])

    hooks = [projection.register_forward_pre_hook(read_rounded) for projection in projections]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def values_from_keys(attentions: Iterable[Any], dtype: torch.dtype, group: int) -> Iterator[None]:
    """Keys before RoPE as a cache in `dtype` has them, and values of these, ``K W_K^-1 W_V``, computed in fp64.

    That is slim attention as its paper has it (equation 1.4), with nothing fitted to a text.

    Args:
        attentions: With linear layers `k_proj` and `v_proj`.
        dtype: Of the cache.
        group: Numbers that share a scale in 8 bits.
    """

    def cached(module: nn.Module, args: tuple[Any, ...], keys: Tensor) -> Tensor:
        return rounded(keys, dtype, group).to(keys.dtype)

    def values_of(attention: Any) -> Callable[..., Tensor]:
        key, value = attention.k_proj, attention.v_proj
        matrix = solve_key_to_value(key.weight.double().mT, value.weight.double().mT).matrix
        key_bias, value_bias = (0.0 if one.bias is None else one.bias.double() for one in (key, value))

        def values(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            return ((key(args[0]).double() - key_bias) @ matrix + value_bias).to(output.dtype)

        return values

    hooks = []
    try:
        for attention in attentions:
            hooks.append(attention.k_proj.register_forward_hook(cached))
            hooks.append(attention.v_proj.register_forward_hook(values_of(attention)))
        yield
    finally:
        for hook in hooks:
            hook.remove()
