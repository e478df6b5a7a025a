"""Base class of attention layers that cache no values, and RoPE."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from ..attention.autocast import no_autocast
from .eight_bits import EIGHT_BITS, load, store
from .slim_attention import cache_dtype, slim_attention
from .slim_layers import SlimLayer
from .slim_values import SlimValues
from .wide_products import KeyProjection, wide

ROTATION: Final = "slim_rotation"
"""Argument of the attention layers: cos and sin of this pass's tokens, then of all keys, each
``[rows or 1, tokens, rotated coordinates]`` in fp32."""

Tables = tuple[Tensor, Tensor, Tensor, Tensor]


class SlimAttention(nn.Module):
    """Attention that caches keys from before norm and RoPE, and V-coordinates, in the place of keys and values.

    A base class that precedes an architecture's own, of which it keeps the output projection, dropouts and scale.

    Args:
        config: Of the model.
        layer_idx: Of the layer.
        layer: What it caches, not ``kv``.

    Attributes:
        values_from: Name of the projection that makes values in the ordinary layer. Where it makes queries and keys
            too, the slim layer has projections ``q_proj`` and ``k_proj`` of its own: keys alone leave their
            accumulator in fp32, and queries and keys are then named alike in all architectures.
        rotary: Whether RoPE stands between projections and scores.
    """

    values_from: ClassVar[str] = "v_proj"
    rotary: ClassVar[bool] = True
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: nn.Module
    o_proj: nn.Module

    def __init__(self, config: Any, layer_idx: int, layer: SlimLayer) -> None:
        super().__init__(config, layer_idx=layer_idx)
        self.layer = layer
        bias = getattr(self, self.values_from).bias is not None
        delattr(self, self.values_from)
        inputs, width = config.hidden_size, config.num_attention_heads * self.head_dim
        if not hasattr(self, "q_proj"):
            self.q_proj = nn.Linear(inputs, width, bias=bias)
        self.k_proj = KeyProjection(inputs, width, bias=bias)
        self.slim = SlimValues(inputs, width, width, layer.rank, getattr(torch, config.slim_matrix_dtype))

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As the ordinary layer's, with `slim_rotation` in the place of `position_embeddings`.

        Raises:
            ValueError: `slim_rotation` is missing, since the layer is not called by a slim model; or the layer caches
                in 8 bits, through which no gradients flow, and is being trained.
        """
        rotation = kwargs.get(ROTATION)
        if self.rotary and rotation is None:
            raise ValueError(f"a slim attention layer needs {ROTATION}; call it through a slim model")
        query = self.q_proj(hidden_states)
        dtype = query.dtype  # under autocast that of its products
        stored_dtype = cache_dtype(dtype, self.layer)
        if self.training and stored_dtype in EIGHT_BITS:
            raise ValueError(
                f"layer {self.layer_idx} caches in {self.layer.cache_dtype}, through which no gradients flow; call "
                "eval(), or train a model converted with cache dtype auto"
            )
        keys, coordinates = (
            store(one, stored_dtype, self.head_dim)
            for one in self.slim.to_cache(hidden_states, self.k_proj(hidden_states))
        )
        if past_key_values is not None:
            with no_autocast(keys.device):  # which does not concatenate fp16
                keys, coordinates = past_key_values.update(keys, coordinates, self.layer_idx)
        keys, coordinates = (load(one, stored_dtype, self.head_dim) for one in (keys, coordinates))
        query = self._heads(self.query_norm(query).to(wide(dtype)))
        if rotation is not None:
            query_cos, query_sin, key_cos, key_sin = rotation
            query = self.rotate(query, query_cos, query_sin)
            scored = self._heads(self.key_norm(self.slim.rotatable(keys)))
            scored = self.rotate(scored, key_cos, key_sin)
        else:  # the offset adds one number to all scores of a query, which the softmax ignores
            scored = self._heads(keys[:, 0].to(wide(keys.dtype)))
        out, weights = slim_attention(
            query,
            scored,
            keys,
            coordinates,
            self.slim,
            attention_mask,
            scaling=self.scaling,
            dropout=self.dropout_share() if self.training else 0.0,
            dtype=dtype,
            weights_wanted=self.weights_wanted(kwargs),
        )
        return self.output(out), weights

    def query_norm(self, query: Tensor) -> Tensor:
        """QK-norm of projected queries, ``[rows, tokens, heads * head_dim]``."""
        return query

    def key_norm(self, keys: Tensor) -> Tensor:
        """QK-norm of projected keys, ``[rows, tokens, heads * head_dim]`` in fp32; they are cached before it."""
        return keys

    def rotate(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """RoPE of the first coordinates, as many as tables have, of ``[rows, heads, tokens, head_dim]``."""
        return rotate_first(x, cos, sin, rotate_half)

    def output(self, out: Tensor) -> Tensor:
        """Output projection and residual dropout."""
        projected: Tensor = self.o_proj(out)
        return projected

    def dropout_share(self) -> float:
        """Share of the attention weights that training drops."""
        return self.attention_dropout

    def weights_wanted(self, kwargs: dict[str, Any]) -> bool:
        """Whether a pass with these arguments may be asked for its attention weights."""
        return bool(self.config._attn_implementation == "eager")

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def rotate_first(x: Tensor, cos: Tensor, sin: Tensor, turned: Callable[[Tensor], Tensor]) -> Tensor:
    """RoPE of the first coordinates.

    Args:
        x: ``[rows, heads, tokens, head_dim]``.
        cos, sin: ``[rows or 1, tokens, rotated]`` with ``rotated <= head_dim``; the other coordinates pass.
        turned: Turns each pair of coordinates by a right angle: `rotate_half` or `rotate_pairs`.
    """
    rotated = cos.shape[-1]
    if rotated == x.shape[-1]:
        return x * cos[:, None] + turned(x) * sin[:, None]
    first = x[..., :rotated]
    return torch.cat([first * cos[:, None] + turned(first) * sin[:, None], x[..., rotated:]], -1)


def rotate_half(x: Tensor) -> Tensor:
    """Turn pairs of coordinates i and i + n of 2 n (Llama, GPT-NeoX) by a right angle."""
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def rotate_pairs(x: Tensor) -> Tensor:
    """Turn pairs of coordinates 2 i and 2 i + 1 (GPT-J, Cohere) by a right angle."""
    return torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
