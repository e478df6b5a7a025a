"""What a decoder with cross-attention is given as its cache: handles in the place of its inputs' keys and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from torch import Tensor
from transformers import Cache, EncoderDecoderCache
from transformers.cache_utils import CacheLayerMixin

from ...attention.active_passes import cast
from ...attention.kv import Scoring
from ...attention.placeholders import CrossKV
from ...errors import Unsupported

Attend = Callable[[int, Tensor, Scoring], Tensor]
"""Attends a layer's queries ``[rows, heads, queries, head_dim]``; returns ``[rows, queries, heads, head_dim]``."""


class HasInputs(Protocol):
    """What a view asks of inputs: the layers that hold theirs, how long one is, and room for those of a new layer."""

    tokens: int

    @property
    def layers(self) -> Sequence[int]: ...
    def store(self, layer: int, keys: Tensor, values: Tensor, mask: Tensor | None) -> None: ...


class CrossView(EncoderDecoderCache):
    """What a decoder with cross-attention takes as its cache: a cache of its own tokens, and the inputs' layers."""

    def __init__(self, cache: Cache, inputs: HasInputs, attend: Attend):
        self.self_attention_cache = cache
        self.cross_attention_cache = _CrossCache(inputs, attend, len(cache.layers))
        self.is_updated = dict.fromkeys(inputs.layers, True)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse tokens of code that expects the cache of a decoder alone."""
        raise Unsupported("its attention code does not tell its own tokens from those of an encoder")


class _CrossCache(Cache):
    def __init__(self, inputs: HasInputs, attend: Attend, layers: int):
        super().__init__(layers=[_CrossLayer(inputs, attend, index) for index in range(layers)])


class _CrossLayer(CacheLayerMixin):
    """Hands out handles in the place of keys and values, also to models that read these as attributes."""

    is_sliding = False

    def __init__(self, inputs: HasInputs, attend: Attend, index: int):
        super().__init__()
        self.keys = self.values = StoredKV(inputs, attend, index)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """No-op: there is nothing to allocate."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[CrossKV, CrossKV]:
        """Take keys and values of all inputs, ``[inputs, kv_heads, tokens, head_dim]`` each."""
        handle = _New(self.keys, cast(key_states), cast(value_states))
        return handle, handle

    def get_seq_length(self) -> int:
        return self.keys.inputs.tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length(), 0

    def get_max_length(self) -> int:
        return -1


class StoredKV(CrossKV):
    """What stands for a layer's keys, and for its values, of an input that is stored."""

    def __init__(self, inputs: HasInputs, attend: Attend, index: int):
        self.inputs, self._attend, self.index = inputs, attend, index

    def show(self, mask: Tensor | None) -> None:
        """No-op: the mask was needed to store them."""

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        return self._attend(self.index, query, scoring)


class _New(CrossKV):
    def __init__(self, stored: StoredKV, keys: Tensor, values: Tensor):
        self._stored, self._keys, self._values, self.device = stored, keys, values, keys.device

    def show(self, mask: Tensor | None) -> None:
        self._stored.inputs.store(self._stored.index, self._keys, self._values, mask)

    def attend(self, query: Tensor, scoring: Scoring) -> Tensor:
        return self._stored.attend(query, scoring)
