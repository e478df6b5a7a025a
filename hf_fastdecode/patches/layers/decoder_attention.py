"""Self-attention and cross-attention of slim decoders with an encoder (Slim attention, section 7).

Each of a layer's two attentions has a plan:

| plan | attention | cached per token |
|---|---|---|
| ``kv`` | both | keys and values, as in the ordinary model |
| ``k``, ``k+r`` | both | keys, and r V-coordinates: option 1 of the paper for cross-attention |
| ``x`` | self-attention | the layer's inputs |
| ``e`` | cross-attention | nothing: option 2, in which layers read the encoder's output |

Ordinary models too keep the encoder's output, once for all layers and outside the cache, so it does not count as bytes
of the cache. Over a shared-context cache both attentions store the keys and values that these caches stand for, like
ordinary layers: values of few inputs and of a decoder's few tokens cost less than making them anew in every step.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, ClassVar, Self

from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from ..._compat import takes_cache
from ...attention.interface import attend_encoded, attend_shared
from ...attention.kv import Segment
from ...attention.overrides import no_autocast
from ...cache.layers.cross import CrossView
from ...conversion.fit.cached_numbers import load, store
from ..config_base import SlimLayer
from .attention_layer import check_shared
from .slim_attention import CachedTokens, SlimTokens, cache_dtype, check_trainable


class SlimDecoderAttention(SlimTokens):
    """Self-attention or cross-attention of a decoder, without RoPE, that does not cache keys and values.

    Precedes an architecture's class among base classes, of which it keeps the projections of queries and of the
    output, biases of positions, dropout and scale. With plans ``x`` and ``e`` all weights are the ordinary layer's.
    `output_projection` is the name of that of the output.
    """

    output_projection: ClassVar[str] = "out_proj"
    num_heads: int
    dropout: float

    def __init__(self, layer: SlimLayer, cross: bool, **ordinary: Any) -> None:
        super().__init__(**ordinary)
        self.layer, self.cross = layer, cross
        _, key, value = (getattr(self, name) for name in self.projections)
        delattr(self, self.projections[2])
        biases = {"key_bias": key.bias is not None, "value_bias": value.bias is not None}
        self.make_projections(self.num_heads, key.in_features, key.out_features, **biases)

    @classmethod
    def in_place_of(cls, ordinary: Any, layer: SlimLayer, cross: bool) -> Self:
        """A slim layer with the sizes of an ordinary one, by BART's and Whisper's arguments."""
        names = ("embed_dim", "num_heads", "dropout", "is_causal", "config", "layer_idx")
        return cls(layer, cross, is_decoder=True, **{name: getattr(ordinary, name) for name in names})

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
        (`attention.kv.Scoring`) are `distances`, else in the mask, which is as for `slim_attention`. Raises ValueError
        where the layer caches in 8 bits and is being trained, Unsupported as `check_shared`.
        """
        query = getattr(self, self.projections[0])(hidden_states)
        output = getattr(self, self.output_projection)
        inputs, dtype = hidden_states if encoded is None else encoded, query.dtype  # under autocast of its products
        if isinstance(cache, CrossView):
            return output(self._shared(query, inputs, cache, mask, distances)), None
        dropout, stored_dtype = self.dropout if self.training else 0.0, cache_dtype(dtype, self.layer)
        if self.training:
            check_trainable(stored_dtype, self.layer_idx)
        stored = self._filled(cache)
        if stored is None:
            stored = self._update(cache, self.stored(*self.to_cache(inputs), stored_dtype, None))
        if self.layer.plan == "e":  # which the cache does not hold
            stored = self.stored(*self.to_cache(inputs), stored_dtype, None)
        wanted = self.config._attn_implementation == "eager"
        given = {"dtype": dtype, "dropout": dropout, "weights_wanted": wanted, "causal": not self.cross}
        out, weights = self.attend_to(self.scored_query(query, None), stored, None, mask, **given)
        return output(out), weights

    def _shared(self, query: Tensor, inputs: Tensor, cache: CrossView, mask: Any, distances: Tensor | None) -> Tensor:
        """Attention over a shared-context cache, ``[rows, queries, heads * head_dim]``."""
        check_shared(self.config, mask)
        dtype = query.dtype
        per_head = query.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        def project() -> Segment:
            stored_dtype, width = cache_dtype(dtype, self.layer), self.head_dim
            with no_autocast(inputs.device) if self.caches_inputs else nullcontext():  # other values do so themselves
                stored = (store(one, stored_dtype, width) for one in self.to_cache(inputs))
                keys, coordinates = (load(one, self.read_dtype, width) for one in stored)
                return self.keys_and_values(CachedTokens(keys, coordinates, None), dtype)

        if self.cross:
            out = attend_encoded(self, per_head, cache, mask, scaling=self.scaling, project=project)
        else:
            kv, _ = cache.self_attention_cache.update(*project(), self.layer_idx)
            out = attend_shared(self, per_head, kv, scaling=self.scaling, distances=distances)
        return out.flatten(2)

    def _filled(self, cache: Any) -> Segment | None:
        """Tensors that cross-attention cached in an earlier pass; None before."""
        if not (self.cross and isinstance(cache, EncoderDecoderCache) and cache.is_updated.get(self.layer_idx)):
            return None
        layer = cache.cross_attention_cache.layers[self.layer_idx]
        return Segment(layer.keys, layer.values)

    def _update(self, cache: Any, new: Segment) -> Segment:
        """Add to the cache, and return all of it; cross-attention caches in an `EncoderDecoderCache` only.

        With plan ``e`` empty tensors are cached: Whisper's `generate` reads those of every layer.
        """
        part = None if self.cross else cache
        if isinstance(cache, EncoderDecoderCache):
            part = cache.cross_attention_cache if self.cross else cache.self_attention_cache
        if part is None:
            return new
        if self.layer.plan == "e":
            new = Segment(*(one[:, :, :0, :0] for one in new))
        with no_autocast(new.keys.device):  # which does not concatenate fp16
            stored = Segment(*part.update(*new, self.layer_idx))
        if self.cross:
            cache.is_updated[self.layer_idx] = True
        return stored
