"""Self-attention and cross-attention of slim decoders with an encoder (Slim attention, section 7).

A decoder layer has two attentions, each with a plan of its own:

| plan | attention | cached per token |
|---|---|---|
| ``kv`` | both | keys and values, as in the ordinary model |
| ``k``, ``k+r`` | both | keys, and r V-coordinates: option 1 of the paper for cross-attention |
| ``x`` | self-attention | the layer's inputs |
| ``e`` | cross-attention | nothing: option 2 of the paper |

With ``e``, layers read the encoder's output, which generation passes to every step, repeated for beams and for
`num_return_sequences`. Ordinary models too keep it, once for all layers and outside the cache, so it does not count as
bytes of the cache.

Over a shared-context cache both store keys and values like ordinary layers, those that these caches stand for, so that
all its operators serve: of the encoder's output once for each distinct input, which costs less than making values anew
in every step, and of a decoder's own few tokens for each row.
"""

from __future__ import annotations

from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache

from ..._compat import takes_cache
from ...attention.active_passes import no_autocast
from ...attention.interface import attend_encoded, attend_shared
from ...cache.layers.cross import CrossView
from ...conversion.fit.cached_numbers import load, store
from ..slim_layers import SlimLayer
from .attention_layer import check_shared
from .slim_attention import (
    CachedValues,
    InputProjection,
    InputValues,
    KeyProjection,
    cache_dtype,
    check_trainable,
    input_keys,
    score_operands,
    slim_attention,
)
from .slim_values import SlimValues, wide


class SlimDecoderAttention(nn.Module):
    """Self-attention or cross-attention of a decoder, without RoPE, that does not cache keys and values.

    Precedes an architecture's own class among base classes, of which it keeps the projections of queries and of the
    output, biases of positions, dropout and scale. With plans ``x`` and ``e`` all weights are the ordinary layer's.
    `projections` are the names of those of queries, keys, values and output.
    """

    projections: ClassVar[tuple[str, str, str, str]] = ("q_proj", "k_proj", "v_proj", "out_proj")
    config: Any
    layer_idx: int
    num_heads: int
    scaling: float
    dropout: float

    def __init__(self, layer: SlimLayer, cross: bool, **ordinary: Any) -> None:
        super().__init__(**ordinary)
        self.layer, self.cross = layer, cross
        _, key, value, _ = self.projections
        projection = getattr(self, key)
        inputs, width, bias = projection.in_features, projection.out_features, projection.bias is not None
        if layer.plan in ("x", "e"):
            setattr(self, key, InputProjection(inputs, width, bias=bias))
            setattr(self, value, InputProjection(inputs, width, bias=getattr(self, value).bias is not None))
        else:
            setattr(self, key, KeyProjection(inputs, width, bias=bias))
            delattr(self, value)
            self.slim = SlimValues(inputs, width, width, layer.rank, getattr(torch, self.config.slim_matrix_dtype))

    @classmethod
    def in_place_of(cls, ordinary: Any, layer: SlimLayer, cross: bool) -> Self:
        """A slim layer with the sizes of an ordinary one, by BART's and Whisper's arguments."""
        return cls(
            layer,
            cross,
            embed_dim=ordinary.embed_dim,
            num_heads=ordinary.num_heads,
            dropout=ordinary.dropout,
            is_decoder=True,
            is_causal=ordinary.is_causal,
            config=ordinary.config,
            layer_idx=ordinary.layer_idx,
        )

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        cache: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        return self.attend(hidden_states, key_value_states, cache, attention_mask)

    def attend(
        self,
        hidden_states: Tensor,
        encoded: Tensor | None,
        cache: Any,
        mask: Tensor | None,
        distances: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention, from a layer's inputs ``[rows, queries, d]`` to its output projection, with weights or None.

        For cross-attention `encoded` is the encoder's output, ``[rows, tokens, key_d]``. The cache is an
        `EncoderDecoderCache`; any cache for self-attention; or None. Over a shared-context cache, biases by distance
        (`attention.kv.Scoring`) are `distances`, else in the mask, which is as for `slim_attention`.

        Raises:
            ValueError: The layer caches in 8 bits and is being trained.
            Unsupported: Over a shared-context cache, small weights are skipped.
        """
        query_name, key_name, value_name, output_name = self.projections
        query = getattr(self, query_name)(hidden_states)
        if isinstance(cache, CrossView):
            return getattr(self, output_name)(
                self._shared(query, hidden_states, encoded, cache, mask, distances)
            ), None
        dtype = query.dtype  # under autocast that of its products
        query = query.to(wide(dtype)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        dropout = self.dropout if self.training else 0.0
        inputs, group = hidden_states if encoded is None else encoded, query.shape[-1]
        stored_dtype = cache_dtype(dtype, self.layer)
        if self.training:
            check_trainable(stored_dtype, self.layer_idx)
        values: CachedValues
        if self.layer.plan in ("x", "e"):
            keys = inputs.to(dtype)[:, None]
            coordinates = keys[..., :0]
            if self.layer.plan == "x":
                keys, _ = self._update(cache, store(keys, stored_dtype, group), coordinates)
                keys = load(keys, stored_dtype, group)
            elif self._filled(cache) is None:  # empty tensors: Whisper's `generate` reads those of every layer
                self._update(cache, keys[:, :, :0, :0], coordinates[:, :, :0])
            absorb = query.shape[2] < min(query.shape[-1], keys.shape[-1]) and not dropout
            values = InputValues(getattr(self, value_name), self.num_heads, self.num_heads)
            with no_autocast(query.device):
                query, scored = score_operands(query, keys, getattr(self, key_name), self.num_heads, absorb=absorb)
        else:
            values = self.slim
            stored = self._filled(cache)
            if stored is None:
                exact = self.slim.to_cache(inputs, getattr(self, key_name)(inputs))
                stored = self._update(cache, *(store(one, stored_dtype, group) for one in exact))
            keys, coordinates = (load(one, stored_dtype, group) for one in stored)
            # The offset adds one number to all scores of a query, which the softmax ignores.
            scored = keys[:, 0].to(wide(keys.dtype)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        out, weights = slim_attention(
            query,
            scored,
            keys,
            coordinates,
            values,
            mask,
            scaling=self.scaling,
            dropout=dropout,
            threshold=self.config.slim_sparsity_threshold,
            dtype=dtype,
            weights_wanted=self.config._attn_implementation == "eager",
            causal=not self.cross,
        )
        return getattr(self, output_name)(out), weights

    def _shared(
        self,
        query: Tensor,
        hidden_states: Tensor,
        encoded: Tensor | None,
        cache: CrossView,
        mask: Any,
        distances: Tensor | None,
    ) -> Tensor:
        """Attention over a shared-context cache, ``[rows, queries, heads * head_dim]``."""
        check_shared(self.config, mask)
        per_head = query.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        inputs, dtype = hidden_states if encoded is None else encoded, query.dtype

        def project() -> tuple[Tensor, Tensor]:
            return self.keys_and_values(inputs, dtype)

        if self.cross:
            out = attend_encoded(self, per_head, cache, mask, scaling=self.scaling, project=project)
        else:
            kv, _ = cache.self_attention_cache.update(*project(), self.layer_idx)
            out = attend_shared(self, per_head, kv, scaling=self.scaling, distances=distances)
        return out.flatten(2)

    def keys_and_values(self, inputs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of inputs ``[rows, tokens, d]`` as what is cached of them gives them.

        Returns ``[rows, heads, tokens, head_dim]`` each; keys lack what adds one number to all scores of a query.
        """
        _, key_name, value_name, _ = self.projections
        stored_dtype, heads = cache_dtype(dtype, self.layer), self.num_heads
        project = getattr(self, key_name)
        group = project.out_features // heads
        if self.layer.plan in ("x", "e"):
            cached = inputs.to(dtype)[:, None]
            if self.layer.plan == "x":
                cached = load(store(cached, stored_dtype, group), stored_dtype, group)
            with no_autocast(inputs.device):
                keys = input_keys(cached, project, heads, heads)
            values = InputValues(getattr(self, value_name), heads, heads).per_token(cached, cached[..., :0])
        else:
            exact = self.slim.to_cache(inputs, project(inputs))
            cached, coordinates = (load(store(one, stored_dtype, group), stored_dtype, group) for one in exact)
            keys = cached[:, 0].unflatten(-1, (heads, -1)).transpose(1, 2)
            values = self.slim.per_token(cached, coordinates)
        return keys.to(dtype), values.unflatten(-1, (heads, -1)).transpose(1, 2).to(dtype)

    def _filled(self, cache: Any) -> tuple[Tensor, Tensor] | None:
        """Tensors that cross-attention cached in an earlier pass; None before."""
        if not (self.cross and isinstance(cache, EncoderDecoderCache) and cache.is_updated.get(self.layer_idx)):
            return None
        layer = cache.cross_attention_cache.layers[self.layer_idx]
        return layer.keys, layer.values

    def _update(self, cache: Any, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Add to the cache, and return all of it; cross-attention caches in an `EncoderDecoderCache` only."""
        part = None if self.cross else cache
        if isinstance(cache, EncoderDecoderCache):
            part = cache.cross_attention_cache if self.cross else cache.self_attention_cache
        if part is None:
            return keys, values
        with no_autocast(keys.device):  # which does not concatenate fp16
            stored: tuple[Tensor, Tensor] = part.update(keys, values, self.layer_idx)
        if self.cross:
            cache.is_updated[self.layer_idx] = True
        return stored
