"""Records what routers choose in the passes of a `generate` call, by the tokens that each pass computes.

Passes over a shared-context cache say where their tokens are stored: runs of nodes in prefill, and a place in every
row's suffix in a step. Passes of stock compute the same columns of all rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...attention.forest import Path
from ...cache.shared import SharedContextCache
from .choices import Numbers, RecordedRow, RouterChoices
from .routers import collecting, routers_of


class Recorder:
    """What routers chose in the passes of one call, all of whose rows run in every step.

    Attributes:
        paths: The nodes of each row as prefill has filled them; () in calls that run stock.
    """

    def __init__(self, model: nn.Module, rows: int):
        self.routers, self._rows = routers_of(model.modules(), type(model).__name__), rows
        self.paths: tuple[Path, ...] = ()
        self._experts: tuple[int, ...] = ()
        self._parts: list[Tensor] = []
        self._count = 0
        self._segments: dict[int, dict[int, Numbers]] = {}
        self._steps: dict[int, Numbers] = {}  # by place in suffixes, or by column: the token of each row

    def run(self, cache: Any, run: Callable[..., Any], **kwargs: Any) -> Any:
        """Run a pass over a cache, if it has one, and record it."""
        shared = isinstance(cache, SharedContextCache)
        current = cache.state.current if shared else None
        first = cache.suffix_length if shared else 0 if cache is None else int(cache.get_seq_length())
        with collecting(self.routers) as collected:
            output = run(**kwargs)
        self._experts = collected.experts
        chosen = collected.of_layers(len(self.routers))
        if current is None or not current.items:
            self.take_steps(first, chosen)
            return output
        tokens = self._take(chosen if current.positions is None else chosen[current.positions.to(chosen.device)])
        for item in current.items:
            of_item, tokens = tokens[: item.span.length], tokens[item.span.length :]
            self._segments.setdefault(item.span.segment, {})[item.span.start] = of_item
        return output

    def take_steps(self, first: int, chosen: Tensor) -> None:
        """Record choices ``[rows * tokens, layers, experts_per_token]`` of tokens that follow `first` in each row."""
        for place, tokens in enumerate(self._take(chosen).reshape(self._rows, -1).T):
            self._steps[first + place] = tokens

    def _take(self, chosen: Tensor) -> Numbers:
        """Keep choices, and number them."""
        self._parts.append(chosen)
        numbers = np.arange(self._count, self._count + len(chosen))
        self._count += len(chosen)
        return numbers

    def choices(self, sequences: Tensor, shown: Tensor) -> RouterChoices:
        """The choices of finished rows.

        Args:
            sequences: ``[rows, width]`` int64: prompts and completions.
            shown: ``[rows, width]`` bool: which of them are no padding.
        """
        ids, real = sequences.cpu().numpy(), shown.cpu().numpy()
        rows = []
        for row in range(self._rows):
            of_row, columns = ids[row, real[row]], np.flatnonzero(real[row])
            rows.append(RecordedRow(of_row, self._tokens(row, columns)))
        device = self._parts[-1].device
        return RouterChoices.of(torch.cat([part.to(device) for part in self._parts]), rows, self._experts)

    def _tokens(self, row: int, columns: Numbers) -> Numbers:
        """The numbers of a row's tokens, but for the last one."""
        count = len(columns) - 1
        if not self.paths:
            return np.array([self._steps[column][row] for column in columns[:count]], dtype=np.int64)
        runs = [_run(self._segments[span.segment], span.start, span.stop) for span in self.paths[row]]
        found = np.concatenate([np.zeros(0, dtype=np.int64), *runs])
        after = [self._steps[place][row] for place in range(count - len(found))]
        return np.concatenate([found, np.array(after, dtype=np.int64)])[:count]


def _run(parts: Mapping[int, Numbers], start: int, stop: int) -> Numbers:
    """Tokens of a segment, whose recorded parts begin at these places."""
    first = max(part for part in parts if part <= start)
    found = []
    while start < stop:
        tokens = parts[first][start - first :][: stop - start]
        found.append(tokens)
        start = first = start + len(tokens)
    return np.concatenate(found)
