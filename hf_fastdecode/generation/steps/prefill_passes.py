"""The captured prefill passes of a call, the kernels that compile meanwhile, and captures that fail.

While prompts are prefilled whose steps will be captured, the kernels that these launch begin to compile. They are
found by launches over empty tensors, which do not take place (`kernels.ahead`); others are compiled at the capture.

A capture may run out of memory, be refused by a kernel or a view (`Unsupported`), perhaps for this batch's rows or
lengths alone, or meet an operation that CUDA does not allow during a capture.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel

from ...attention.forest import Forest
from ...attention.kv import Scoring, SuffixLengths, unwritten_partial
from ...attention.launch.plan import HeadShape, choose_own_nodes
from ...attention.launch.step_tables import RestTables, StepTables
from ...attention.overrides import autocast_dtype
from ...cache.captured_prefill import context_forest, takes_captured_passes, takes_captured_rows
from ...cache.handles import ExpandedOfStep
from ...cache.layers.latent import ExpandedNodes, Widths, paying_nodes, runs_of
from ...cache.shared import SharedContextCache
from ...cache.stores import Kind, Store
from ...errors import PassFailedError, Unsupported, ran_out_of_memory
from ...kernels.ahead import compile_in_background
from ..autocast import computes_in
from ..call_context import CallContext
from ..decoding.sampling import compile_sampler
from ..fused.trial import names_in
from .captured_prefill import Captured, CapturedPrefill, CapturedPrefills, CapturedRows, PrefillShape, RowShape
from .captured_step import bucket

_MEMORY_PER_BUFFERS = 64
"""Memory of a device as a multiple of what a captured pass may keep for keys and values: 1,024 tokens of a 7B model
with multi-head attention on 40 GB."""

_MOST_TOKENS_BY_ROWS = 256
"""Maximum tokens of prompts in a captured pass by rows: beyond, kernels run for longer than launching them takes."""

_BY_ROWS = "prefill by rows"
"""Key of `Captures.failures` for all captured passes by rows."""


class PrefillPasses:
    """Captured packed prefill of one call, which holds the lock of the model's captures.

    `refresh` drops captures that the model's state has outdated; see `PrefillShape` for `fused_rows`.
    """

    def __init__(self, call: CallContext, refresh: Callable[[], None], fused_rows: int):
        self._call, self._refresh, self._fused_rows = call, refresh, fused_rows

    def __call__(self, cache: SharedContextCache, tokens: Tensor, wanted: Sequence[int]) -> Tensor | None:
        """Prefill the cache's current items by a captured pass.

        `tokens` are ids of the items in their order, ``[length]`` int64. Returns the logits of the `wanted` ones,
        ``[len(wanted), vocabulary]``; None if the pass is to run eagerly, to which nothing has been done then.
        """
        call, items = self._call, cache.state.current.items
        planes, autocast = cache.position_planes, autocast_dtype(call.model.device)
        shape = PrefillShape.of(items, len(tokens), len(wanted), planes, self._fused_rows, autocast)
        if shape is None or _kind(shape) in call.state.captures.failures:
            return None
        layout = call.structure.layout
        numbers = sum(store.numbers * layers for store, layers in layout.distinct.items())
        if not _takes_little_memory(call.model, shape.tokens * numbers):
            return None
        cache.meet(layout)
        longest = cache.longest_row(len(tokens))
        if not takes_captured_passes(cache, items, computes_in(call.model), call.model.device, longest):
            return None
        self._refresh()
        forest = context_forest(items, shape.tokens) if shape.contexts else None
        prefills, ahead = call.state.captures.prefills, call.state.captures.ahead
        make = partial(CapturedPrefill, call.model, shape, cache, forest, longest, call.structure)
        captured = _find(call, prefills, shape, forest, longest, make, _kind(shape))
        if captured is None:
            return None
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


class RowPasses:
    """Captured first passes by rows of one call; arguments as for `PrefillPasses`."""

    def __init__(self, call: CallContext, refresh: Callable[[], None]):
        self._call, self._refresh = call, refresh

    def __call__(self, cache: SharedContextCache, ids: Tensor, places: Tensor, wanted: int) -> Any:
        """Prefill the cache's current items by a captured pass.

        Takes ids ``[rows, width]``, none of which is padding, and their positions ``[rows or 1, width]``, int64.
        Returns the model's output, with logits ``[rows, wanted, vocabulary]`` of the last `wanted` positions alone;
        None if the pass is to run eagerly, to which nothing has been done then.
        """
        call = self._call
        layout = call.structure.layout
        if ids.dim() != 2 or ids.numel() > _MOST_TOKENS_BY_ROWS or _BY_ROWS in call.state.captures.failures:
            return None
        cache.meet(layout)
        if not takes_captured_rows(cache, layout):
            return None
        assert cache.inputs is not None
        hidden = cache.inputs.hidden
        if (hidden.dtype, hidden.device) != (call.model.dtype, call.model.device):
            return None
        numbers = sum(store.numbers for store in layout.shared.values())
        if not _takes_little_memory(call.model, hidden.shape[0] * hidden.shape[1] * numbers):
            return None
        self._refresh()
        rows, width = ids.shape
        shape = RowShape(rows, width, hidden.shape[1], autocast_dtype(hidden.device))
        longest = cache.longest_row(width)
        make = partial(CapturedRows, call.model, shape, cache, longest, call.structure)
        captured = _find(call, call.state.captures.by_rows, shape, None, longest, make, _BY_ROWS)
        if captured is None:
            return None
        output = captured(cache, ids, places, wanted)
        cache.state.met = ref(call.model)
        call.report.captured_prefill_tokens += ids.numel()
        call.report.observe(cache)
        return output


def _find(
    call: CallContext,
    kept: CapturedPrefills[Captured],
    shape: Hashable,
    forest: Forest | None,
    longest: int,
    make: Callable[[Any], Captured],
    kind: Hashable,
) -> Captured | None:
    """The captured pass for a cache's current items; captured now by `make` where that pays and does not fail."""
    found = kept.find(shape, forest, longest)
    if found is not None or not kept.pays(shape, forced=call.options.needs_capture is not None):
        return found
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
    """Whether a captured pass's buffers of so many elements, which stay allocated, are a small share of the memory."""
    if model.device.type != "cuda":
        return True
    total = torch.cuda.get_device_properties(model.device).total_memory
    return numbers * model.dtype.itemsize <= total / _MEMORY_PER_BUFFERS


def begin_compiling_sampler(call: CallContext, processors: LogitsProcessorList, prompts: Tensor) -> None:
    """Begin to compile the sampling kernel for the call of a model's first captures; prompts are ``[rows, width]``."""
    if call.mode == "eager" or call.state.captures.made or (head := call.model.get_output_embeddings()) is None:
        return
    in_fp32 = "float" in names_in(type(call.model))  # logits, as of Mamba's code; other ones compile later
    device = call.model.device
    dtype = torch.float32 if in_fp32 else autocast_dtype(device) or call.model.dtype

    def launch() -> None:  # where weights are quantized it may find none
        logits = torch.empty(1, head.weight.shape[0], dtype=dtype, device=device)
        compile_sampler(call.options.sampler, processors, call.config, prompts, logits)

    compile_in_background(launch, device)


def begin_compiling_attention(call: CallContext, forest: Forest) -> None:
    """Begin to compile the decode kernels for steps over a forest, once for so many rows."""
    at_once, begun = min(forest.rows, call.options.max_rows or forest.rows), call.state.captures.compiling
    dtype = computes_in(call.model)
    if call.mode == "eager" or (bucket(at_once), dtype) in begun:
        return
    begun.add((bucket(at_once), dtype))
    compile_in_background(lambda: _attend_all(call, forest.select_rows(range(at_once)), dtype), call.model.device)


def _attend_all(call: CallContext, forest: Forest, dtype: torch.dtype) -> None:
    """Launch the decode kernels of a captured step over a forest, for launches that are left out."""
    model, layout, merged = call.model, call.structure.layout, False
    steps = int(call.config.max_length) - max(forest.context_lengths, default=0)
    made_of = next(iter(layout.expanding.values()), None)
    if made_of is not None and (wanted := paying_nodes(forest, steps)):
        split = ExpandedNodes(runs_of(node.span for node in wanted), {}, 1).split(forest)
        forest, merged = split.as_stored, True
        store = next(iter(layout.distinct))
        _attend_expanded(store, Widths.of(made_of), split.expanded, dtype, model.device)
    for store in layout.distinct:
        if store.kv_heads and (store.head_dim == store.value_dim or store.kind is Kind.LATENT):
            _attend(store, forest, dtype, model.device, merged=merged)


def _attend(store: Store, forest: Forest, dtype: torch.dtype, device: torch.device, *, merged: bool = False) -> None:
    """Launch the kernels of a layer's captured step over a forest, merged with expanded nodes or not."""
    rows, heads, kv_heads = bucket(forest.rows), store.kv_heads * store.group_size, store.kernel_heads
    rest = store.head_dim - store.value_dim  # of latents
    query = torch.empty(rows, heads, 1, store.head_dim, dtype=dtype, device=device)
    keys = torch.empty(rows, kv_heads, 1, store.value_dim, dtype=dtype, device=device)
    values = torch.empty(rows, kv_heads, 1, rest, dtype=dtype, device=device) if rest else keys
    scoring = Scoring(1.0)
    own_nodes = choose_own_nodes(rows, HeadShape.of(query, keys, scoring), device, dominate=False)
    tables = StepTables(rows, [0], forest, device, own_nodes)
    tables.follow(forest, SuffixLengths(), {})
    into = unwritten_partial(query, store.value_dim) if merged else None
    tables.attend(0, query, keys, values, scoring, into=into)


def _attend_expanded(store: Store, widths: Widths, forest: Forest, dtype: torch.dtype, device: torch.device) -> None:
    """As `_attend`, for nodes with latents that are read as keys and values."""
    rows, heads = bucket(forest.rows), store.query_heads
    query = torch.empty(rows, heads, 1, widths.key + widths.rotated, dtype=dtype, device=device)
    own = unwritten_partial(query, widths.value)
    tables = RestTables(widths.rotated, rows, [0], forest, device)
    tables.follow(forest, SuffixLengths(), {})
    ExpandedOfStep(0, widths, tables).attend(query, Scoring(1.0), own)


class Failure(NamedTuple):
    """Why a capture failed."""

    reason: str  # the error's first line
    out_of_memory: bool  # whether PyTorch's memory did not suffice: fewer rows may be captured
    unsupported: bool  # whether it was refused: other rows and lengths may be captured

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Classify the error of a capture; one for which other processes wait (`PassFailedError`) is raised again."""
        if isinstance(error, PassFailedError):
            raise error
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return cls(reason, ran_out_of_memory(error), isinstance(error, Unsupported))


def fall_back(call: CallContext, what: str, failure: Failure, key: Hashable, *, lasts: bool, raises: bool) -> str:
    """Run eagerly what could not be captured, with a warning once; returns the reason.

    Args:
        what: What runs eagerly, as the warning says it.
        key: What it is for `Captures.failures`.
        lasts: Whether it is not captured again until `Captures.retry`.
        raises: Whether a forced mode raises ValueError.
    """
    if raises and (forced := call.options.needs_capture):
        raise cannot_run(forced, failure.reason)
    if lasts:
        call.state.captures.fail(key, failure.reason, call.model.device)
    call.state.log_once(f"{what} ({failure.reason})")
    return failure.reason


def cannot_run(forced: str, reason: str) -> ValueError:
    """The error of a forced option that cannot be fulfilled."""
    return ValueError(f"{forced} cannot run: {reason}; use {forced.partition('=')[0]}='auto'")
