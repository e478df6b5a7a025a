"""Base class of attention layers that cache no values."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers.cache_utils import QuantizedCache

from ..._compat import takes_cache
from ...attention.active_passes import no_autocast
from ...attention.kv import Segment
from ...cache.captured import CapturedCache
from ...cache.shared import SharedContextCache
from ..slim_layers import SlimLayer
from .projections import InputProjection, KeyProjection
from .rotation import ROTATION, Rotation, takes_kernels
from .shared_attention import captured_attention, captured_in_few_launches, shared_attention
from .slim_attention import cache_dtype, check_trainable, slim_attention
from .slim_tokens import SlimTokens
from .slim_values import SlimValues
from .suffix_kernel import cached_attention, kernel_refusal, layer_refusal


class SlimAttention(SlimTokens):
    """Attention that caches keys from before QK-norm, and V-coordinates, in the place of keys and values.

    Keys are cached before RoPE, or after it, beside their positions (`SlimConfig.slim_rope`). Without norm and RoPE,
    plan ``x`` caches the layer's inputs instead, with all weights as in the ordinary layer.

    Precedes an architecture's own class among base classes, of which it keeps output projection, dropouts and scale.

    Args:
        config: The model's config.
        layer_idx: Index of the layer.
        layer: Cache layout of the layer, not ``kv``.

    Attributes:
        values_from: Name of the ordinary layer's value projection, which only plan ``x`` keeps. If it is fused with
            those of queries and keys, the slim layer has ``q_proj``, ``k_proj`` and, for plan ``x``, ``v_proj``
            instead, so that keys leave their accumulator in fp32.
        output_projection: Name of the output projection.

    Architectures also override `interleaved`, `query_norm`, `key_norm`, `output`, `dropout_share` where they differ.
    """

    values_from: ClassVar[str] = "v_proj"
    output_projection: ClassVar[str] = "o_proj"
    attends_by_itself: ClassVar[bool] = True  # see `AttendsByItself`
    suffixes_read: ClassVar[str] = "slim suffixes by slim_decode"
    attention_dropout: float

    def __init__(self, config: Any, layer_idx: int, layer: SlimLayer) -> None:
        super().__init__(config, layer_idx=layer_idx)
        self.config, self.layer = config, layer
        bias = getattr(self, self.values_from).bias is not None
        delattr(self, self.values_from)
        inputs, width = config.hidden_size, config.num_attention_heads * self.head_dim
        if not hasattr(self, "q_proj"):
            self.q_proj = nn.Linear(inputs, width, bias=bias)
        if layer.plan == "x":
            self.k_proj, self.v_proj = (InputProjection(inputs, width, bias=bias) for _ in "kv")
        else:
            self.k_proj = KeyProjection(inputs, width, bias=bias)
            self.slim = SlimValues(inputs, width, width, layer.rank, getattr(torch, config.slim_matrix_dtype))

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend, with the ordinary layer's arguments, but `ROTATION` in the place of `position_embeddings`.

        Raises:
            ValueError: `ROTATION` is missing, since the layer is not called by a slim model; the layer caches in 8
                bits and is being trained; a `QuantizedCache` would round positions; or the cache holds tokens of
                another `slim_rope` or model.
        """
        rotation: Rotation | None = kwargs.get(ROTATION)
        if self.config.rotary and rotation is None:
            raise ValueError(f"a slim attention layer needs {ROTATION}; call it through a slim model")
        if isinstance(cache, CapturedCache):
            out = captured_in_few_launches(self, hidden_states, cache, rotation, attention_mask)
            if out is not None:
                return self.output(out), None
        query = self.q_proj(hidden_states)
        dtype = query.dtype  # under autocast that of its products
        stored_dtype = cache_dtype(dtype, self.layer)
        if self.training:
            check_trainable(stored_dtype, self.layer_idx)
        if self.config.unrotates and isinstance(cache, QuantizedCache):
            raise ValueError(
                "a QuantizedCache rounds the positions that slim_rope 'unrotate' caches; set slim_rope of the config "
                "to 'raw', or convert with cache dtype int8"
            )
        exact = self.to_cache(hidden_states)
        if isinstance(cache, SharedContextCache):
            out = shared_attention(self, query, *exact, cache, rotation, attention_mask)
            return self.output(out), None
        if isinstance(cache, CapturedCache):
            out = captured_attention(self, query, *exact, cache, rotation, attention_mask)
            return self.output(out), None
        with no_autocast(query.device):  # which does not concatenate fp16
            keys, coordinates = self.stored(*exact, stored_dtype, rotation)
            if cache is not None:
                if (held := values_held(cache, self.layer_idx)) is not None:
                    self.require_layout(held)
                keys, coordinates = cache.update(keys, coordinates, self.layer_idx)
        dropout = self.dropout_share() if self.training else 0.0
        threshold, weights_wanted = self.config.slim_sparsity_threshold, self.weights_wanted(kwargs)
        query = self.scored_query(query, rotation and rotation.tokens)
        with no_autocast(query.device):
            if not dropout and not threshold and not weights_wanted:
                by_kernel = cached_attention(self, query, Segment(keys, coordinates), rotation, attention_mask)
                if by_kernel is not None:
                    return self.output(by_kernel.transpose(1, 2).flatten(2).to(dtype)), None
            tokens = self.read(keys, coordinates, rotation and rotation.keys)
            query, scored = self.score_operands(query, tokens, dropout=dropout)
        out, weights = slim_attention(
            query,
            scored,
            tokens.keys,
            tokens.coordinates,
            self.values,
            attention_mask,
            scaling=self.scaling,
            dropout=dropout,
            threshold=threshold,
            dtype=dtype,
            weights_wanted=weights_wanted,
        )
        return self.output(out), weights

    @property
    def no_captured_steps(self) -> str | None:
        """Why decode steps with this layer cannot be captured; None if no reason is known."""
        if (reason := layer_refusal(self)) is not None:
            return f"slim_decode does not attend to what layer {self.layer_idx} caches: {reason}"
        kind = (getattr(self.config, "rope_parameters", None) or {}).get("rope_type")
        if self.config.rotary and kind in ("dynamic", "longrope"):
            return f"RoPE of type {kind!r} changes its frequencies with the length"
        return None

    def suffixes_take_prompts(self, rows: int, room: int, tokens: int, backend: str) -> bool:
        """Whether suffixes store unshared prompts in fewer bytes than nodes, see `AttendsByItself`."""
        weight = self.k_proj.weight
        if not takes_kernels(backend, weight.device):
            return False
        empty = weight.new_empty(1, 1, 0, self.heads * self.head_dim)
        suffix = self.stored(empty, empty[..., : self.layer.rank], cache_dtype(weight.dtype, self.layer), None)
        bytes_of_nodes = tokens * 2 * empty.shape[-1] * weight.element_size()
        if room * sum(part.shape[-1] * part.element_size() for part in suffix) >= bytes_of_nodes:
            return False
        return kernel_refusal(self, weight.new_empty(rows, self.heads, 1, self.head_dim), suffix) is None

    def output(self, out: Tensor) -> Tensor:
        """Output projection, and residual dropout in architectures whose attention has it."""
        projected: Tensor = getattr(self, self.output_projection)(out)
        return projected

    def dropout_share(self) -> float:
        """Share of the attention weights that training drops."""
        return self.attention_dropout

    def weights_wanted(self, kwargs: dict[str, Any]) -> bool:
        """Whether a pass with these arguments may be asked for its attention weights."""
        return bool(self.config._attn_implementation == "eager")


def values_held(cache: Any, layer_idx: int) -> Tensor | None:
    """A transformers cache's tensor in the place of a layer's values, ``[rows, heads, slots, width]``, if any."""
    layers = getattr(cache, "layers", ())
    held = getattr(layers[layer_idx], "values", None) if layer_idx < len(layers) else None
    return held if held is not None and held.dim() == 4 else None
