"""Runs the packed prefill passes of a call by captured graphs, where there are some or a capture pays."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...attention.forest import Forest
from ...cache.captured_prefill import context_forest, takes_captured_passes
from ...cache.shared import SharedContextCache
from ...errors import ran_out_of_memory
from ..call_context import CallContext
from .captured_prefill import CapturedPrefill, PrefillShape

_MEMORY_PER_BUFFERS = 64
"""Memory of a device as a multiple of what a captured pass may keep for keys and values: 1,024 tokens of a 7B model
with multi-head attention on 40 GB."""


class PrefillPasses:
    """Captured prefill of one call, which holds the lock of the model's captures.

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
        call, items = self._call, cache.state.packed
        shape = PrefillShape.of(items, len(tokens), len(wanted), cache.position_planes, self._fused_rows)
        if shape is None or (shape.several, shape.contexts) in call.state.captures.prefills.failures:
            return None
        if not self._takes_little_memory(shape.tokens):
            return None
        cache.meet(call.structure.layout)
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

    def _takes_little_memory(self, tokens: int) -> bool:
        """Whether the buffers of `tokens` tokens, which stay allocated, take a small share of the device's memory."""
        model, layout = self._call.model, self._call.structure.layout
        if model.device.type != "cuda":
            return True
        numbers = sum(store.numbers * layers for store, layers in layout.distinct.items())
        total = torch.cuda.get_device_properties(model.device).total_memory
        return tokens * numbers * model.dtype.itemsize <= total / _MEMORY_PER_BUFFERS

    def _find(
        self, shape: PrefillShape, cache: SharedContextCache, forest: Forest | None, longest: int
    ) -> CapturedPrefill | None:
        """The captured pass for the cache's current items; captured now where that pays and does not fail."""
        call, captures = self._call, self._call.state.captures
        found = captures.prefills.find(shape, forest, longest)
        forced = call.options.needs_capture is not None
        if found is not None or not captures.prefills.pays(shape, forced=forced):
            return found
        try:
            return captures.capture_prefill(call.model, shape, cache, forest, longest, call.structure)
        except Exception as error:  # out of memory, or an operation not allowed during capture
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if not ran_out_of_memory(error):
                captures.prefills.failures[shape.several, shape.contexts] = reason
        call.report.prefill_reason = reason
        call.state.log_once(f"prefill of this model runs eagerly: its passes cannot be captured ({reason})")
        return None
