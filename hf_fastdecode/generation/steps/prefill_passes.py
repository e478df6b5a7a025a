"""Runs the prefill passes of a call by captured graphs, where there are some or a capture pays."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...attention.forest import Forest
from ...cache.captured_prefill import context_forest, takes_captured_passes, takes_captured_rows
from ...cache.layers.cross import ENCODER_OUTPUTS
from ...cache.shared import SharedContextCache
from ..call_context import CallContext
from .capture_failures import Failure, fall_back
from .captured_prefill import Captured, CapturedPrefill, CapturedPrefills, CapturedRows, PrefillShape, RowShape

_MEMORY_PER_BUFFERS = 64
"""Memory of a device as a multiple of what a captured pass may keep for keys and values: 1,024 tokens of a 7B model
with multi-head attention on 40 GB."""

_MOST_TOKENS_BY_ROWS = 256
"""Maximum tokens of prompts in a captured pass by rows: beyond, kernels run for longer than launching them takes."""

_BY_ROWS = "prefill by rows"
"""Key of `Captures.failures` for all captured passes by rows."""


class PrefillPasses:
    """Captured packed prefill of one call, which holds the lock of the model's captures.

    Args:
        refresh: Drops captures that the model's state has outdated.
        fused_rows: Maximum tokens for which projections of the same input run concurrently.
    """

    def __init__(self, call: CallContext, refresh: Callable[[], None], fused_rows: int):
        self._call, self._refresh, self._fused_rows = call, refresh, fused_rows

    def __call__(self, cache: SharedContextCache, tokens: Tensor, wanted: Sequence[int]) -> Tensor | None:
        """Prefill the cache's current items by a captured pass.

        Args:
            tokens: ``[length]`` int64: ids of the items, in their order.
            wanted: Indices of tokens to return logits for.

        Returns:
            ``[len(wanted), vocabulary]``; None if the pass is to run eagerly, to which nothing has been done then.
        """
        call, items = self._call, cache.state.current.items
        shape = PrefillShape.of(items, len(tokens), len(wanted), cache.position_planes, self._fused_rows)
        if shape is None or _kind(shape) in call.state.captures.failures:
            return None
        layout = call.structure.layout
        numbers = sum(store.numbers * layers for store, layers in layout.distinct.items())
        if not _takes_little_memory(call.model, shape.tokens * numbers):
            return None
        cache.meet(layout)
        longest = cache.longest_row(len(tokens))
        if not takes_captured_passes(cache, items, call.model.dtype, call.model.device, longest):
            return None
        self._refresh()
        forest = context_forest(items, shape.tokens) if shape.contexts else None
        captured = self._find(shape, cache, forest, longest)
        if captured is None:
            return None
        prefills, ahead = call.state.captures.prefills, call.state.captures.ahead
        if ahead is not None and ahead.is_of(captured, tokens):
            logits = captured.end(cache, ahead.outputs(), len(wanted))
        else:
            call.state.captures.join_ahead()
            logits = captured(cache, forest, tokens, wanted)
        whole = not (shape.several or shape.contexts) and list(wanted) == [len(tokens) - 1]
        prefills.again = (shape, prefills.asked) if whole else None
        call.report.captured_prefill_tokens += len(tokens)
        call.report.observe(cache)
        return logits

    def _find(
        self, shape: PrefillShape, cache: SharedContextCache, forest: Forest | None, longest: int
    ) -> CapturedPrefill | None:
        """The captured pass for the cache's current items; captured now where that pays and does not fail."""
        call, captures = self._call, self._call.state.captures
        found = captures.prefills.find(shape, forest, longest)
        forced = call.options.needs_capture is not None
        if found is not None or not captures.prefills.pays(shape, forced=forced):
            return found
        make = partial(CapturedPrefill, call.model, shape, cache, forest, longest, call.structure)
        return _captured(call, captures.prefills, make, _kind(shape))


class RowPasses:
    """Captured first passes of one call, which holds the lock of the model's captures.

    Args:
        refresh: Drops captures that the model's state has outdated.
    """

    def __init__(self, call: CallContext, refresh: Callable[[], None]):
        self._call, self._refresh = call, refresh

    def __call__(self, cache: SharedContextCache, ids: Tensor, places: Tensor, wanted: int) -> Any:
        """Prefill the cache's current items by a captured pass.

        Args:
            ids: ``[rows, width]`` int64, none of which is padding.
            places: ``[rows or 1, width]`` int64: their positions.
            wanted: Last positions of each row to return logits for.

        Returns:
            The model's output, with logits ``[rows, wanted, vocabulary]`` alone; None if the pass is to run eagerly,
            to which nothing has been done then.
        """
        call = self._call
        layout = call.structure.layout
        if ids.dim() != 2 or ids.numel() > _MOST_TOKENS_BY_ROWS or _BY_ROWS in call.state.captures.failures:
            return None
        cache.meet(layout)
        if not takes_captured_rows(cache, layout):
            return None
        assert cache.inputs is not None
        hidden = cache.inputs.arguments[ENCODER_OUTPUTS][0]
        if (hidden.dtype, hidden.device) != (call.model.dtype, call.model.device):
            return None
        numbers = sum(store.numbers for store in layout.cross.values())
        if not _takes_little_memory(call.model, hidden.shape[0] * hidden.shape[1] * numbers):
            return None
        self._refresh()
        rows, width = ids.shape
        shape = RowShape(rows, width, hidden.shape[1])
        captured = self._find(shape, cache)
        if captured is None:
            return None
        output = captured(cache, ids, places, wanted)
        cache.state.met = ref(call.model)
        call.report.captured_prefill_tokens += ids.numel()
        call.report.observe(cache)
        return output

    def _find(self, shape: RowShape, cache: SharedContextCache) -> CapturedRows | None:
        """The captured pass of this shape; captured now where that pays and does not fail.

        Where another cache reads its memory, there is none, and no second one is made.
        """
        call, captures, longest = self._call, self._call.state.captures, cache.longest_row(shape.width)
        found = captures.by_rows.find(shape, None, longest)
        forced = call.options.needs_capture is not None
        if found is not None or captures.by_rows.holds(shape) or not captures.by_rows.pays(shape, forced=forced):
            return found
        make = partial(CapturedRows, call.model, shape, cache, longest, call.structure)
        return _captured(call, captures.by_rows, make, _BY_ROWS)


def _captured(
    call: CallContext, kept: CapturedPrefills[Captured], make: Callable[[Any], Captured], kind: Hashable
) -> Captured | None:
    """Capture a pass and keep it; None where that fails, with the reason in the report.

    Args:
        make: Captures it, in the memory pool that it is given.
        kind: Passes that are not captured again after a failure that is not for lack of memory.
    """
    try:
        return call.state.captures.capture_prefill(kept, make, call.model.device)
    except Exception as error:
        failure = Failure.of(error)
        what, lasts = "prefill of this model runs eagerly: its passes cannot be captured", not failure.out_of_memory
        call.report.prefill_reason = fall_back(call, what, failure, kind, lasts=lasts, raises=False)
    return None


def _kind(shape: PrefillShape) -> Hashable:
    """The passes that fail together: those that take several runs of tokens, or contexts, as this shape does."""
    return "prefill", shape.several, shape.contexts


def _takes_little_memory(model: PreTrainedModel, numbers: int) -> bool:
    """Whether a captured pass's buffers of so many numbers, which stay allocated, are a small share of the memory."""
    if model.device.type != "cuda":
        return True
    total = torch.cuda.get_device_properties(model.device).total_memory
    return numbers * model.dtype.itemsize <= total / _MEMORY_PER_BUFFERS
