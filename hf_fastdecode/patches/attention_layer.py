"""Base class of attention layers that cache no values, and RoPE."""

from __future__ import annotations

from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from ..attention.autocast import no_autocast
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
        values_from: Name of the ordinary layer's value projection, which the slim layer drops. If it is fused with
            those of queries and keys, the slim layer has a ``q_proj`` and a ``k_proj`` instead: keys alone leave
            their accumulator in fp32.
        output_projection: Name of the output projection.
        rotary: Whether RoPE stands between projections and scores.
        interleaved: Whether RoPE pairs coordinates 2 i and 2 i + 1 (GPT-J, Cohere), not i and i + n of 2 n (Llama).
    """

    values_from: ClassVar[str] = "v_proj"
    output_projection: ClassVar[str] = "o_proj"
    rotary: ClassVar[bool] = True
    interleaved: ClassVar[bool] = False
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    attention_dropout: float
    q_proj: nn.Module

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
            ValueError: `slim_rotation` is missing, since the layer is not called by a slim model.
        """
        rotation = kwargs.get(ROTATION)
        if self.rotary and rotation is None:
            raise ValueError(f"a slim attention layer needs {ROTATION}; call it through a slim model")
        query = self.q_proj(hidden_states)
        dtype = query.dtype  # under autocast that of its products
        cached_dtype = cache_dtype(dtype, self.layer.float16)
        keys, coordinates = self.slim.to_cache(hidden_states, self.k_proj(hidden_states), cached_dtype)
        if past_key_values is not None:
            with no_autocast(keys.device):  # which does not concatenate fp16
                keys, coordinates = past_key_values.update(keys, coordinates, self.layer_idx)
        query = self._heads(self.query_norm(query).to(wide(dtype)))
        if rotation is not None:
            query_cos, query_sin, key_cos, key_sin = rotation
            query = rotate(query, query_cos, query_sin, interleaved=self.interleaved)
            scored = self._heads(self.key_norm(self.slim.rotatable(keys)))
            scored = rotate(scored, key_cos, key_sin, interleaved=self.interleaved)
        else:  # without the key offset, which adds one number to all scores of a query: the softmax ignores it
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

    def output(self, out: Tensor) -> Tensor:
        """Output projection and, in architectures that have it here, residual dropout."""
        projected: Tensor = getattr(self, self.output_projection)(out)
        return projected

    def dropout_share(self) -> float:
        """Share of the attention weights that training drops."""
        return self.attention_dropout

    def weights_wanted(self, kwargs: dict[str, Any]) -> bool:
        """Whether a pass with these arguments may be asked for its attention weights."""
        return bool(self.config._attn_implementation == "eager")

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool) -> Tensor:
    """RoPE of the first coordinates.

    Args:
        x: ``[rows, heads, tokens, head_dim]``.
        cos, sin: ``[rows or 1, tokens, rotated]`` with ``rotated <= head_dim``; the other coordinates pass.
        interleaved: As in `SlimAttention`.
    """
    rotated = cos.shape[-1]
    first = x[..., :rotated]
    # Each pair of coordinates, turned by a right angle.
    if interleaved:
        turned = torch.stack([-first[..., 1::2], first[..., ::2]], -1).flatten(-2)
    else:
        low, high = first.chunk(2, -1)
        turned = torch.cat([-high, low], -1)
    first = first * cos[:, None] + turned * sin[:, None]
    return first if rotated == x.shape[-1] else torch.cat([first, x[..., rotated:]], -1)
