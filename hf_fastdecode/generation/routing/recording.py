"""Records what routers choose in the passes of a `generate` call, by the tokens that each pass computes.

Passes over a shared-context cache say where their tokens are stored: runs of nodes in prefill, and a place in every
row's suffix in a step. Passes of stock compute the same columns of all rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...attention.forest import Path
from ...cache.shared import SharedContextCache
from .choices import Numbers, RecordedRow, RouterChoices
from .routers import Collected, routers_of, visiting


class Recorder:
    """What routers chose in the passes of one call, all of whose rows run in every step.

    Attributes:
        paths: The nodes of each row as prefill has filled them; () in calls that run stock.
    """

    def __init__(self, model: nn.Module, rows: int):
        self._routers, self._rows = routers_of(model), rows
        self._experts: dict[int, int] = {}
        self._parts: list[Tensor] = []
        self._count = 0
        self._segments: dict[int, Numbers] = {}
        self._steps: dict[int, Numbers] = {}  # by place in suffixes, or by column: the token of each row
        self.paths: tuple[Path, ...] = ()

    def run(self, cache: Any, run: Callable[..., Any], **kwargs: Any) -> Any:
        """Run a pass over a cache, if it has one, and record it."""
        collected, shared = Collected(self._routers), isinstance(cache, SharedContextCache)
        current = cache.state.current if shared else None
        first = cache.suffix_length if shared else 0 if cache is None else int(cache.get_seq_length())
        with visiting(self._routers, collected):
            output = run(**kwargs)
        self._experts, chosen = collected.experts, collected.of_layers()
        if current is None or not current.items:
            self.take_steps(first, chosen)
            return output
        tokens = self._take(chosen if current.positions is None else chosen[current.positions.to(chosen.device)])
        for item in current.items:
            span, length = item.span, item.span.length
            segment = self._segments.setdefault(span.segment, np.zeros(len(cache.segment_tokens[span.segment]), int))
            segment[span.start : span.stop], tokens = tokens[:length], tokens[length:]
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
        """The choices of finished rows.

        Args:
            sequences: ``[rows, width]`` int64: prompts and completions.
            shown: ``[rows, width]`` bool: which of them are no padding.
        """
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
        experts = [self._experts[layer] for layer in sorted(self._experts)]
        return RouterChoices.of(torch.cat(self._parts), rows, tuple(experts))
