"""Attention in a fixed order of sums: by position in a row, however rows share keys and whichever pass runs.

Steps, prefill and passes without a cache describe what their queries attend to alike: by paths of runs of keys. The
kernels (`kernels.invariant`) are the same too, so that a token's attention has the same bits in all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._compat import setting
from ..errors import Unsupported
from ..kernels.invariant.api import MOST_HEAD_DIM, addresses, aligned, attend, attention_config
from ..kernels.invariant.schedule import Queries, Tables, schedule
from .forest import Forest, Span
from .kv import Partial, Scoring, Segment
from .torch_operators.prefill_ops import Run

_on: ContextVar[bool] = ContextVar("hf_fastdecode_in_order", default=False)

in_order: Callable[[], AbstractContextManager[None]] = partial(setting, _on, True)
"""Context of a pass in which products, norms and attention add up in a fixed order."""

is_in_order = _on.get
"""Whether this thread's pass does."""


class InOrder:
    """The queries of a pass, the same for all of its layers.

    Args:
        names: Of runs of keys that lie elsewhere than the pass's own ones, which follow them.
        lengths: Keys of each run.
    """

    def __init__(self, names: Sequence[Any], lengths: Sequence[int], queries: Sequence[Queries]):
        self.names, self._lengths, self._queries = names, lengths, queries
        self._schedules: dict[Hashable, list[Tables]] = {}

    @classmethod
    def of_step(cls, forest: Forest, suffixes: int | Sequence[int], queries: int) -> InOrder:
        """Of the last tokens of all rows: runs are spans of nodes, and a suffix for each row."""
        lengths = [suffixes] * forest.rows if isinstance(suffixes, int) else list(suffixes)
        numbers = {span: number for number, span in enumerate(dict.fromkeys(node.span for node in forest.nodes))}
        rows = [
            Queries((*map(numbers.__getitem__, path), len(numbers) + row), context + lengths[row] - queries, queries)
            for row, (path, context) in enumerate(zip(forest.paths, forest.context_lengths, strict=True))
        ]
        return cls(list(numbers), [*(span.length for span in numbers), *lengths], rows)

    @classmethod
    def of_prefill(cls, runs: Sequence[Run]) -> InOrder:
        """Of runs of tokens: their contexts, which are spans, and the runs themselves."""
        names = list(dict.fromkeys(name for run in runs for name in run.context))
        numbers = {name: number for number, name in enumerate(names)}
        lengths = [name.length for name in names if isinstance(name, Span)]
        if len(lengths) < len(names):
            raise Unsupported("contexts of unknown length are not attended to in a fixed order")
        queries = [
            Queries(
                (*(numbers[name] for name in run.context), len(names) + place),
                sum(lengths[numbers[name]] for name in run.context),
                run.length,
            )
            for place, run in enumerate(runs)
        ]
        return cls(names, [*lengths, *(run.length for run in runs)], queries)

    def attend(self, query: Tensor, runs: Sequence[tuple[Tensor, Tensor] | Segment], scoring: Scoring) -> Partial:
        """Attention of queries ``[queries, heads, head_dim]`` to the runs.

        Takes keys and values of each, as `addresses` does.

        Returns ``out`` ``[queries, heads, head_dim]`` in the query's dtype, and ``lse`` ``[heads, queries]``.

        Raises:
            Unsupported: The layer's scores are more than scaled products within a window, or its heads too large.
        """
        heads, head_dim = query.shape[1:]
        kv_heads = runs[0][0].shape[-3]
        if scoring.softcap is not None or scoring.sinks is not None or scoring.distances is not None:
            raise Unsupported(f"attention in a fixed order of sums is plain or windowed{scoring.report_note}")
        alike = {part.shape[-1] for run in runs for part in run} == {head_dim}
        if not alike or head_dim > MOST_HEAD_DIM or head_dim * query.itemsize % 16:
            raise Unsupported(
                f"attention in a fixed order of sums takes heads of up to {MOST_HEAD_DIM} elements, and of a multiple "
                f"of 16 bytes, got {head_dim} elements"
            )
        config = attention_config(head_dim, query.dtype)
        if heads // kv_heads > config.block_m:
            raise Unsupported(
                f"attention in a fixed order of sums takes up to {config.block_m} query heads for a KV head, got "
                f"{heads // kv_heads}"
            )
        name = heads // kv_heads, scoring.window, config, query.device
        if (launches := self._schedules.get(name)) is None:
            given = self._queries, self._lengths, *name[:3]
            launches = self._schedules[name] = [part.to(query.device) for part in schedule(*given)]
        stored = [tuple(_rows(part, query.dtype) for part in run) for run in runs]
        given_runs: Any = stored
        return Partial(*attend(query, addresses(given_runs), launches, kv_heads, scoring.scale, config))


def _rows(part: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values whose tokens are read by 16 bytes."""
    part = part.to(dtype)
    return part if part.stride(-1) == 1 and part.data_ptr() % 16 == 0 else aligned(part)
