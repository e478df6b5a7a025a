"""`RouterChoices`: the experts that the rows of a `generate` call chose; `Recorder` makes them.

A pass over a shared-context cache says where its tokens are stored: in runs of nodes in prefill, at a place of every
row's suffix in a step. Passes of stock compute the same columns of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from ...attention.forest import Path
from ...cache.shared import SharedContextCache
from .routers import Collected, routers_of, visiting

Numbers = NDArray[np.int64]


def model_type_of(model: PreTrainedModel) -> str:
    """The `model_type` of a model's text config, which models with images or another head have too."""
    return str(model.config.get_text_config(decoder=True).model_type)


class RecordedRow(NamedTuple):
    """A row of prompt and completion."""

    ids: Numbers  # [length]: its tokens, without padding
    tokens: Numbers  # [length]: where their choices are stored; -1 for the last, which no layer computed


@dataclass(frozen=True, eq=False)
class RouterChoices:
    """The experts that rows chose in each layer of experts (``output_router_choices=True``).

    ``choices[rows]`` are those of some rows, by number, slice, list, or tensor of indices or booleans.

    Attributes:
        stored: ``[stored, layers, experts_per_token]``, each different one once, in uint8 for up to 256 experts, else
            int16, on the model's first device with experts.
        rows: The rows, in the order of `generate`'s output.
        experts: How many each layer of experts has.
        model_type: That of the model's text config, if known.
    """

    stored: Tensor
    rows: tuple[RecordedRow, ...]
    experts: tuple[int, ...]
    model_type: str = ""

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> RouterChoices:
        count, chosen = len(self), None
        with suppress(IndexError, TypeError, ValueError):  # of many kinds, by NumPy
            chosen = np.atleast_1d(np.arange(count)[rows.cpu().numpy() if isinstance(rows, Tensor) else rows])
        if chosen is None or chosen.ndim > 1:
            raise IndexError(
                f"choices of {count} rows have no {rows!r}; use numbers from -{count} to {count - 1}, a slice, a "
                f"list or tensor of numbers, or one of {count} booleans"
            )
        return replace(self, rows=tuple(self.rows[number] for number in chosen))

    def __repr__(self) -> str:
        stored, layers, count = self.stored.shape
        what = f"{stored} stored: {count} experts in each of {layers} layers, {self.stored.nbytes:,} bytes"
        return f"RouterChoices({len(self)} rows, {what})"

    def of_row(self, row: int) -> Tensor:
        """A copy of a row's choices ``[length - 1, layers, experts_per_token]``, for its tokens but the last one.

        Raises:
            IndexError: There is no such row.
        """
        count = len(self)
        try:
            tokens = self.rows[range(count)[index(row)]].tokens
        except (IndexError, TypeError):
            bounds = f"from -{count} to {count - 1}"
            raise IndexError(f"choices of {count} rows have no row {row!r}; use a number {bounds}") from None
        return self.stored[torch.from_numpy(tokens[:-1]).to(self.stored.device)]

    def find(self, ids: Numbers, number: int) -> Numbers | None:
        """Where choices for a row's tokens are stored, -1 for a last token without; None if no row begins with them.

        Of several rows, that of the given `number` counts, or else the shortest.
        """
        fits = [at for at, row in enumerate(self.rows) if np.array_equal(row.ids[: len(ids)], ids)]
        best = min(fits, key=lambda at: (at != number, len(self.rows[at].ids)), default=None)
        return None if best is None else self.rows[best].tokens[: len(ids)]


class Recorder:
    """What routers choose in a call's passes, all of the same rows; `made` when these are finished, None before."""

    def __init__(self, model: PreTrainedModel):
        self._routers, self._model_type = routers_of(model), model_type_of(model)
        self.made: RouterChoices | None = None
        self.begin()

    def begin(self, cache: Any = None, paths: Sequence[Path] = ()) -> None:
        """Forget all passes: begin, or begin again, a stock call's loop over a cache, or prefill of rows' paths."""
        self._cache, self._paths, self._count = cache, paths, 0
        self._parts: list[Tensor] = []
        self._segments: dict[int, Numbers] = {}
        self._steps: dict[int, Numbers] = {}  # tokens of all rows; ascending by place in suffixes, or by pass

    def run(self, cache: Any, run: Callable[[], Any]) -> Any:
        """Run a pass over a cache, and record it if it is the call's: logits processors may run others."""
        shared = isinstance(cache, SharedContextCache)
        if not shared and cache is not self._cache:
            return run()
        current = cache.state.current if shared else None
        first = cache.suffix_length if shared else self._count
        collected = Collected(self._routers)
        with visiting(self._routers, collected):
            output = run()
        chosen, self._experts = collected.of_layers(), collected.experts
        if current is None or not current.items:
            self.take_step(first, chosen)
            return output
        tokens = self._take(chosen if current.positions is None else chosen[current.positions.to(chosen.device)])
        for item in current.items:
            span, length = item.span, len(cache.segment_tokens[item.span.segment])
            segment = self._segments.setdefault(span.segment, np.zeros(length, np.int64))
            segment[span.start : span.stop], tokens = tokens[: span.length], tokens[span.length :]
        return output

    def take_step(self, first: int, chosen: Tensor) -> None:
        """Keep choices ``[rows * tokens, layers, experts_per_token]`` of tokens that follow `first` in each row."""
        self._steps[first] = self._take(chosen)

    def _take(self, chosen: Tensor) -> Numbers:
        """Keep choices, and number them."""
        self._parts.append(chosen)
        self._count += len(chosen)
        return np.arange(self._count - len(chosen), self._count)

    def finish(self, sequences: Tensor, shown: Tensor) -> RouterChoices:
        """The choices of finished rows ``[rows, width]`` int64, of which a mask shows what is no padding."""
        columns = [np.flatnonzero(real) for real in shown.cpu().numpy()]
        ids = [row[real] for row, real in zip(sequences.cpu().numpy(), columns, strict=True)]
        parts = [self._steps[first].reshape(len(ids), -1) for first in sorted(self._steps)]
        steps = np.concatenate([np.zeros((len(ids), 0), np.int64), *parts], axis=1)
        if self._paths:
            of_nodes = [[self._segments[one.segment][one.start : one.stop] for one in path] for path in self._paths]
            tokens = [np.concatenate([*nodes, row]) for nodes, row in zip(of_nodes, steps, strict=True)]
            tokens = [one[: len(row) - 1] for one, row in zip(tokens, ids, strict=True)]
        elif steps.shape[1] < sequences.shape[1] - 1:
            raise ValueError("passes that are compiled, or make a cache, are not recorded; use disable_compile=True")
        else:
            tokens = [row[real[:-1]] for row, real in zip(steps, columns, strict=True)]
        used, at = np.unique(np.concatenate(tokens), return_inverse=True)
        kept = torch.cat(self._parts)
        kept = kept[torch.from_numpy(used).to(kept.device)]
        numbers = np.ascontiguousarray(kept.flatten(1).cpu().numpy())
        words = numbers.view(np.dtype((np.void, numbers.itemsize * numbers.shape[1])))[:, 0]
        _, first, number = np.unique(words, return_index=True, return_inverse=True)  # equal ones once
        placed = np.split(number[at], np.cumsum([len(one) for one in tokens])[:-1])
        rows = tuple(RecordedRow(one, np.append(part, -1)) for one, part in zip(ids, placed, strict=True))
        self.made = RouterChoices(kept[torch.from_numpy(first).to(kept.device)], rows, self._experts, self._model_type)
        self.begin()
        return self.made
