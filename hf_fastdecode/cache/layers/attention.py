"""A layer with keys and values of every token, in nodes and suffixes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from ..._compat import CACHE
from ...attention.forest import Forest, Span
from ...attention.kv import Segment, SharedKV
from ...errors import Unsupported
from ..handles import DecodeKV, PrefillKV, StoredLayer, packed
from ..state import Pass, SharedState
from ..storage import TokenStorage
from ..stores import Store

REMEDY = "make it with hf_fastdecode.prefill(model, ...) of this model"
"""Remedy for a cache that another model filled."""


def require_dtype(computed: torch.dtype, stored: Sequence[Tensor] | None, what: str = "keys") -> None:
    """Raise ValueError if a pass computes keys in another dtype than those that a layer holds, if it holds any."""
    if stored is not None and stored[0].dtype != computed:
        raise ValueError(
            f"the cache holds {what} in {stored[0].dtype}, and this pass computes {computed}: the model was "
            "converted, or runs under another torch.autocast than when the cache was made; prefill again"
        )


def no_tensor(name: str) -> str:
    """Why layers have no such tensor, and the remedy, for errors."""
    return (
        f"layers of a SharedContextCache have no {name!r} tensor: they are split into nodes and suffixes; "
        f"for a decoding loop that reads them, pass {CACHE}=transformers.DynamicCache() to generate"
    )


def other_heads(held: tuple[int, int], got: tuple[int, int]) -> str:
    """Why a layer's tokens are not those of a model, for errors: each as KV heads, and elements of a head."""
    return f"the cache holds {held[0]} KV heads of {held[1]} numbers, the model has {got[0]} of {got[1]}; {REMEDY}"


class _NoTensor:
    """Descriptor for ``keys`` and ``values``, which other caches' layers hold as tensors; reading raises."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, layer: object, owner: type | None = None) -> Any:
        raise AttributeError(no_tensor(self._name))

    def __set__(self, layer: object, value: object) -> None:
        """Ignore the None that transformers' mixin assigns."""


class PlainLayer(CacheLayerMixin):
    """A layer as masks and `generate` see it: without a window or a bound, as long as all rows of its cache."""

    is_sliding = False
    is_croppable = True
    appended = 0
    state: SharedState

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        """No-op: there is nothing to allocate."""

    def get_seq_length(self) -> int:
        return self.state.padded_length + self.appended

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class SharedContextLayer(StoredLayer, PlainLayer):
    """Cache layer that stores keys and values in nodes and suffixes, by default as they come.

    During prefill ``update`` writes tokens to nodes, or what one row alone has to its suffix; otherwise it appends
    them to each row's suffix. It returns a `SharedKV` in place of the key and value tensors.

    Attributes:
        appended: Tokens that the current forward pass has appended to each row's suffix.
    """

    keys = _NoTensor()
    values = _NoTensor()

    def __init__(self, state: SharedState, index: int, store: Store, storage: TokenStorage | None = None):
        CacheLayerMixin.__init__(self)
        StoredLayer.__init__(self, state, index, store, TokenStorage() if storage is None else storage)

    def lazy_initialization(self, keys: Tensor, values: Tensor) -> None:
        self.dtype, self.device = keys.dtype, keys.device
        self.is_initialized = True

    def update(
        self, keys: Tensor, values: Tensor, *args: Any, suffix_parts: Segment | None = None, **kwargs: Any
    ) -> tuple[SharedKV, SharedKV] | tuple[Tensor, Tensor]:
        """Store new tokens.

        Args:
            keys, values: ``[rows, kv_heads, queries, head_dim]``; during prefill ``[1, kv_heads, tokens, head_dim]``.
            args: Passed on to the storage, which may keep more than keys and values.
            suffix_parts: During prefill of suffixes, the same tokens as suffixes hold them, ``[1, heads, tokens,
                width]`` each; None where they hold them as nodes do.

        Returns:
            The handle for the attention function, twice; in a pass by transformers' own attention
            (`Pass.tensors`) the tensors.

        Raises:
            ValueError: The cache holds another dtype, number of rows, or shape.
            Unsupported: A pass by transformers' own attention has other rows or positions than its prompts.
        """
        current, storage = self.state.current, self.storage
        if current.tensors is not None and current.tensors != (len(keys), keys.shape[2]):
            rows, width = current.tensors
            raise Unsupported(
                f"the model makes {len(keys)} rows of {keys.shape[2]} positions of {rows} prompts of {width} tokens"
            )
        parts = storage.parts_of(keys, values, *args, **kwargs)
        if current.positions is not None:
            parts = Segment._make(packed(part, current.positions) for part in parts)
        if not self.is_initialized:
            storage.describe(suffix_parts or parts)
            self.lazy_initialization(*parts)
        handle: SharedKV
        if current.items:
            handle = self._fill(current, parts, suffix_parts or parts)
            if current.tensors is not None:
                self.report("prefill", "each input once, transformers' own attention")
                return keys, values
        else:
            handle = DecodeKV(self, parts, self._make_room(parts))
        return handle, handle

    def _fill(self, current: Pass, parts: Segment, suffix_parts: Segment) -> PrefillKV:
        """Write tokens of prompts to nodes, or to suffixes; parts are ``[1, heads, tokens, width]`` each."""
        require_dtype(parts[0].dtype, self.storage.node_example)
        own, spans = Segment(parts[0][0], parts[1][0]), current.spans
        new = own if current.divided is None else current.divided.segment_of_all(own)
        handle = PrefillKV(self, own, new)
        if self.state.suffix_rows:
            self._fill_suffixes(spans, suffix_parts)
            return handle
        for span in spans:
            self.storage.segment(span.segment, self.state.stored_length(span.segment), new)
        if (kept := current.own_tokens) is not None:
            indices = kept.indices.to(new.keys.device)
            spans, new = kept.spans, Segment._make(part.index_select(1, indices) for part in new)
        self.storage.write_nodes(spans, new)
        return handle

    def _fill_suffixes(self, spans: Sequence[Span], parts: Segment) -> None:
        """Write prompt tokens to suffixes, which get room for all prompts with the first ones."""
        state, new = self.state, Segment._make(part[0] for part in parts)
        assert state.forest is not None
        self.storage.begin_suffixes(state.forest.rows, state.suffixes.longest, new, most=state.max_suffix)
        start = 0
        for span in spans:
            run = Span(0, start, span.length)
            self.storage.write_suffix(state.suffix_rows[span.segment], span.start, new.view(run))
            start += span.length

    def _make_room(self, parts: Segment) -> Pass:
        """Allocate suffix capacity for a step's tokens, which the attention handle writes; returns the step."""
        rows, _, queries, _ = parts[0].shape
        state, suffix, suffixes = self.state, self.storage.suffix, self.state.suffixes
        held = suffix or self.storage.suffix_example or parts
        if held[0].dtype != parts[0].dtype:
            require_dtype(parts[0].dtype, held)
        if state.forest is None:
            state.forest = Forest(rows)
        if rows != state.forest.rows:
            raise ValueError(
                f"the cache holds {state.forest.rows} rows, got keys for {rows}; expand it with "
                "batch_repeat_interleave, or pass it to generate of a model that is enabled, which does"
            )
        for new, old in zip(parts, held, strict=True):
            if new.shape[-1] != old.shape[-1] or new.shape[-3] != old.shape[-3]:
                raise ValueError(other_heads((old.shape[-3], old.shape[-1]), (new.shape[-3], new.shape[-1])))
        step, after = state.current, suffixes.lengths.longest + queries
        if step.before is not suffixes.lengths or step.forest is not state.forest or step.queries != queries:
            step = state.step(queries)  # once for all layers
        if suffix is None or suffix[0].shape[2] < step.capacity:
            self._grow(after, Segment._make(part[0] for part in parts))
        if suffixes.origins is not None:
            suffixes.origins.append(after)
        self.appended = queries
        return step

    def reserve(self, tokens: int) -> None:
        """Allocate capacity for `tokens` suffix tokens per row."""
        state = self.state
        like = self.storage.suffix_example
        if state.forest is None or like is None or (not self.storage.segments and not self.storage.capacity):
            raise ValueError("this cache layer holds no tokens; prefill it first")
        self._grow(tokens, like)

    def _grow(self, tokens: int, like: Segment) -> None:
        state = self.state
        assert state.forest is not None
        capacity, used = state.division.room(tokens), state.division.suffix_shard.count(state.suffixes.longest)
        most = None if state.max_suffix is None else state.division.room(state.max_suffix)
        self.storage.grow(state.forest.rows, capacity, used, like, most)

    @property
    def batch_size(self) -> int:
        return self.state.forest.rows if self.state.forest is not None else -1

    def reset(self) -> None:
        StoredLayer.__init__(self, self.state, self.index, self.store, self.storage.empty())
        self.is_initialized = False

    def for_nodes_of(self, state: SharedState) -> SharedContextLayer:
        """A layer of another cache with the same segments, which are shared, and empty suffixes."""
        twin = SharedContextLayer(state, self.index, self.store, self.storage.empty())
        twin.take_nodes_of(self)
        return twin

    def take_nodes_of(self, other: SharedContextLayer) -> None:
        self.storage.segments = dict(other.storage.segments)
        if other.is_initialized:
            self.dtype, self.device, self.is_initialized = other.dtype, other.device, True

    def captured(self, state: SharedState, buffers: Iterator[Any]) -> Any:
        """The layer in the view of a captured pass; `buffers` are for what layers store per row."""
        return CapturedLayer(self, state)

    def offload(self) -> None:
        raise NotImplementedError("a SharedContextCache cannot be offloaded; use transformers' DynamicCache for that")

    prefetch = offload


class CapturedLayer(StoredLayer, PlainLayer):
    """A layer of a captured pass, `state.current`, which reads and writes what the pass says.

    Its length is always 0: positions are passed as tensors, and lengths would be constants in the graph. `in_place`
    are the batch's suffixes, where these are captured in place; else None.
    """

    def __init__(self, layer: SharedContextLayer, state: SharedState):
        CacheLayerMixin.__init__(self)
        in_place = layer.storage.captured_in_place and state.current.tables is not None
        storage = layer.storage if in_place else layer.storage.empty()
        StoredLayer.__init__(self, state, layer.index, layer.store, storage)
        self.in_place, self.is_initialized = storage.suffix, True

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> tuple[SharedKV, SharedKV]:
        parts, current = self.storage.parts_of(keys, values, *args, **kwargs), self.state.current
        handle: SharedKV
        if current.padded is None:
            handle = DecodeKV(self, parts, current)
        else:
            own = current.padded.write(self.index, parts)
            handle = PrefillKV(self, own, own)
        return handle, handle
