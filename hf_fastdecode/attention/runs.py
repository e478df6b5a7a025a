"""Runs: the tokens of a prefill pass, side by side, and what each of them sees."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

Name = TypeVar("Name", bound=Hashable)

Place = slice | Tensor
"""Indices of tokens in a forward pass."""

Stored = Callable[[Hashable], tuple[Tensor, Tensor]]
"""Keys and values of a context by its name, each ``[kv_heads, length, head_dim]``."""


class Intervals(NamedTuple):
    """What the tokens of a pass see: an interval of keys each, as the prefill kernel takes them.

    Attributes:
        own: ``[3, tokens]`` int32: every token, and the first and the last of the pass's own tokens that it sees.
        contexts: Likewise by the name of a context, for the tokens that see any of its tokens.
    """

    own: Tensor
    contexts: list[tuple[Hashable, Tensor]]


@dataclass(frozen=True)
class Run:
    """Consecutive tokens of one sequence.

    Attributes:
        length: Number of tokens, at least 1.
        context: Names of the stored contexts before them, in order.
    """

    length: int
    context: tuple[Hashable, ...] = ()


class PackedRuns:
    """The runs of a forward pass, and where their tokens lie in it: the same for all layers.

    Args:
        runs: At least one, in the order of their tokens.

    Attributes:
        contexts: The names of all their contexts.
    """

    def __init__(self, runs: Sequence[Run]):
        self.runs = runs
        self.contexts = list(dict.fromkeys(name for run in runs for name in run.context))
        self._starts = list(accumulate((run.length for run in runs), initial=0))
        self._by_length: dict[torch.device, list[tuple[Place, tuple[int, int]]]] = {}
        self._by_context: dict[torch.device, list[tuple[Hashable, Place]]] = {}
        self._intervals: dict[tuple[torch.device, int | None], Intervals] = {}

    def by_length(self, device: torch.device) -> list[tuple[Place, tuple[int, int]]]:
        """Place, count and length of the runs of each length."""
        if device not in self._by_length:
            alike = _grouped((run.length, index) for index, run in enumerate(self.runs))
            self._by_length[device] = [
                (self._place_of(found, device), (len(found), length)) for length, found in alike.items()
            ]
        return self._by_length[device]

    def by_context(self, device: torch.device) -> list[tuple[Hashable, Place]]:
        """Each context's name, with the positions of the runs that it comes before."""
        if device not in self._by_context:
            readers = _grouped((name, index) for index, run in enumerate(self.runs) for name in run.context)
            self._by_context[device] = [(name, self._place_of(found, device)) for name, found in readers.items()]
        return self._by_context[device]

    def outgrow(self, window: int, stored: Stored) -> bool:
        """Whether a window hides any token of a run or its context from a token of the run."""
        return any(run.length + sum(_lengths(run, stored)) > window for run in self.runs)

    def intervals(self, device: torch.device, window: int | None, stored: Stored) -> Intervals:
        """What each token sees, under a window if given."""
        if (device, window) not in self._intervals:
            self._intervals[device, window] = self._make_intervals(device, window, stored)
        return self._intervals[device, window]

    def _make_intervals(self, device: torch.device, window: int | None, stored: Stored) -> Intervals:
        own, contexts = [], dict[Hashable, list[Tensor]]()
        for run, start in zip(self.runs, self._starts, strict=False):
            token = torch.arange(start, start + run.length, dtype=torch.int32, device="cpu")
            reach = run.length if window is None else window
            own.append(torch.stack([token, (token - reach + 1).clamp_min(start), token]))
            lengths = _lengths(run, stored)
            for index, (name, length) in enumerate(zip(run.context, lengths, strict=True)):
                distance = sum(lengths[index:])  # from the context's first token to the run's
                reach = distance + run.length if window is None else window
                seeing = token[: max(0, length + reach - 1 - distance)]  # the run's first tokens, or all
                first = (seeing - start + distance - reach + 1).clamp_min(0)
                contexts.setdefault(name, []).append(torch.stack([seeing, first, torch.full_like(first, length - 1)]))
        joined = {name: torch.cat(parts, 1) for name, parts in contexts.items()}
        return Intervals(
            torch.cat(own, 1).to(device), [(name, part.to(device)) for name, part in joined.items() if part.shape[1]]
        )

    def _place_of(self, indices: Sequence[int], device: torch.device) -> Place:
        """Token indices of some runs, in order; a slice where they are adjacent."""
        if all(after == before + 1 for before, after in pairwise(indices)):
            return slice(self._starts[indices[0]], self._starts[indices[-1] + 1])
        places = [torch.arange(self._starts[index], self._starts[index + 1], device="cpu") for index in indices]
        return torch.cat(places).to(device)


def _lengths(run: Run, stored: Stored) -> list[int]:
    """Tokens of each context of a run; those that know their length are not read for it."""
    known = (getattr(name, "length", None) for name in run.context)
    return [
        stored(name)[0].shape[1] if length is None else length for name, length in zip(run.context, known, strict=True)
    ]


def _grouped(pairs: Iterable[tuple[Name, int]]) -> dict[Name, list[int]]:
    found: dict[Name, list[int]] = {}
    for name, index in pairs:
        found.setdefault(name, []).append(index)
    return found
