"""`RouterChoices`: the experts that the rows of a `generate` call chose; `Recorder` makes them.

A pass over a shared-context cache says where its tokens are stored: in runs of nodes in prefill, at a place of every
row's suffix in a step. Passes of stock compute the same columns of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from ...attention.forest import Path
from ...cache.shared import SharedContextCache
from .routers import Collected, routers_of, visiting

Numbers = NDArray[np.int64]


class RecordedRow(NamedTuple):
    """A row of prompt and completion.

    Attributes:
        ids: ``[length]``: its tokens, without padding.
        tokens: ``[length - 1]``: where choices for its tokens are stored, but for the last, which no layer computed.
    """

    ids: Numbers
    tokens: Numbers


@dataclass(frozen=True, eq=False)
class RouterChoices:
    """The experts that rows chose in each layer of experts (``output_router_choices=True``).

    A token that rows share is stored once. ``choices[rows]`` are those of some rows, by number, slice, list, or tensor
    of indices or booleans.

    Attributes:
        stored: ``[stored, layers, experts_per_token]``, each different one once, in uint8 for up to 256 experts, else
            int16 or int32, on the model's first device with experts.
        rows: The rows, in the order of `generate`'s output.
        experts: How many each layer of experts has.
    """

    stored: Tensor
    rows: tuple[RecordedRow, ...]
    experts: tuple[int, ...]

    @classmethod
    def of(cls, computed: Tensor, rows: Sequence[RecordedRow], experts: tuple[int, ...]) -> RouterChoices:
        """Choices of rows, whose tokens are indices of what was computed, ``[tokens, layers, experts_per_token]``."""
        used, at = np.unique(np.concatenate([row.tokens for row in rows]), return_inverse=True)
        kept = computed[torch.from_numpy(used).to(computed.device)]
        numbers = np.ascontiguousarray(kept.flatten(1).cpu().numpy())
        words = numbers.view(np.dtype((np.void, numbers.itemsize * numbers.shape[1])))[:, 0]
        _, first, number = np.unique(words, return_index=True, return_inverse=True)
        parts = np.split(number[at], np.cumsum([len(row.tokens) for row in rows])[:-1])
        placed = tuple(row._replace(tokens=part) for row, part in zip(rows, parts, strict=True))
        return cls(kept[torch.from_numpy(first).to(kept.device)], placed, experts)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, rows: Any) -> RouterChoices:
        index = rows.cpu().numpy() if isinstance(rows, Tensor) else rows
        chosen = np.atleast_1d(np.arange(len(self))[index])
        return replace(self, rows=tuple(self.rows[number] for number in chosen))

    def __repr__(self) -> str:
        stored, layers, count = self.stored.shape
        what = f"{count} experts in each of {layers} layers"
        return f"RouterChoices({len(self)} rows, {stored} stored: {what}, {self.stored.nbytes:,} bytes)"

    def of_row(self, row: int) -> Tensor:
        """A copy of a row's choices ``[length - 1, layers, experts_per_token]``, for its tokens but the last one.

        Raises:
            IndexError: There is no such row.
        """
        if not -len(self) <= row < len(self):
            raise IndexError(f"row {row} is out of range for the choices of {len(self)} rows")
        return self.stored[torch.from_numpy(self.rows[row].tokens).to(self.stored.device)]

    def find(self, ids: Numbers, number: int) -> Numbers | None:
        """Where choices for a row's tokens are stored, -1 for a last token without; None if no row begins with them.

        Of several rows, that of the given `number` counts, or else the shortest.
        """
        length = len(ids)
        fits = (
            (at != number, len(row.ids), at)
            for at, row in enumerate(self.rows)
            if len(row.ids) >= length and np.array_equal(row.ids[:length], ids)
        )
        if (best := min(fits, default=None)) is None:
            return None
        tokens = self.rows[best[2]].tokens[:length]
        return np.pad(tokens, (0, length - len(tokens)), constant_values=-1)


class Recorder:
    """What routers chose in the passes of one call, all of whose rows run in every step.

    Attributes:
        paths: The nodes of each row as prefill has filled them; () in calls that run stock.
    """

    def __init__(self, model: nn.Module, rows: int):
        self._routers, self._rows = routers_of(model), rows
        self._experts: tuple[int, ...] = ()
        self._parts: list[Tensor] = []
        self._count = 0
        self._segments: dict[int, Numbers] = {}
        self._steps: dict[int, Numbers] = {}  # by place in suffixes, or by column: the token of each row
        self.paths: tuple[Path, ...] = ()

    def run(self, cache: Any, run: Callable[[], Any]) -> Any:
        """Run a pass over a cache, if it has one, and record it."""
        collected, shared = Collected(self._routers), isinstance(cache, SharedContextCache)
        current = cache.state.current if shared else None
        first = cache.suffix_length if shared else 0 if cache is None else int(cache.get_seq_length())
        with visiting(self._routers, collected):
            output = run()
        chosen, self._experts = collected.of_layers(), collected.experts
        if current is None or not current.items:
            self.take_steps(first, chosen)
            return output
        tokens = self._take(chosen if current.positions is None else chosen[current.positions.to(chosen.device)])
        for item in current.items:
            span, length = item.span, len(cache.segment_tokens[item.span.segment])
            segment = self._segments.setdefault(span.segment, np.zeros(length, np.int64))
            segment[span.start : span.stop], tokens = tokens[: span.length], tokens[span.length :]
        return output

    def take_steps(self, first: int, chosen: Tensor) -> None:
        """Record choices ``[rows * tokens, layers, experts_per_token]`` of tokens that follow `first` in each row."""
        self._steps |= enumerate(self._take(chosen).reshape(self._rows, -1).T, first)

    def _take(self, chosen: Tensor) -> Numbers:
        """Keep choices, and number them."""
        self._parts.append(chosen)
        self._count += len(chosen)
        return np.arange(self._count - len(chosen), self._count)

    def choices(self, sequences: Tensor, shown: Tensor) -> RouterChoices:
        """The choices of finished rows ``[rows, width]`` int64, of which a mask shows what is no padding."""
        steps = np.array([self._steps[place] for place in sorted(self._steps)], np.int64).reshape(-1, self._rows)
        rows = []
        for row, (ids, real) in enumerate(zip(sequences.cpu().numpy(), shown.cpu().numpy(), strict=True)):
            columns = np.flatnonzero(real)
            if self.paths:
                path = [self._segments[span.segment][span.start : span.stop] for span in self.paths[row]]
                tokens = np.concatenate([*path, steps[:, row]])[: len(columns) - 1]
            else:
                tokens = steps[columns[:-1], row]
            rows.append(RecordedRow(ids[columns], tokens))
        return RouterChoices.of(torch.cat(self._parts), rows, self._experts)
