"""Converts a slim layer's cached tokens to keys and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ...attention.kv import Segment
from ..slim_layers import SlimLayer
from ..values.eight_bits import load, store
from ..values.input_projections import InputProjection, InputValues, input_keys, score_operands
from ..values.slim_values import SlimValues
from ..values.wide_products import wide
from .rotation import Tables, rotate
from .slim_attention import CachedValues, cache_dtype


class SlimTokens(nn.Module):
    """Base class of slim attention layers: what they cache, and the keys and values that follow from it.

    With plan ``x`` inputs ``[rows, 1, tokens, d]`` are in the place of keys, beside V-coordinates of width 0. Neither
    norm nor RoPE is in such layers.

    Attributes:
        rotary: Whether RoPE stands between projections and scores.
        interleaved: Whether RoPE pairs coordinates 2 i and 2 i + 1 (GPT-J, Cohere), not i and i + n of 2 n (Llama).
        tables: Makes the tables of positions ``[rows or 1, tokens]``; the decoder sets it if there is RoPE.
        layer: What the layer caches.
        slim: Values of cached keys and V-coordinates.
        v_proj: That of the ordinary layer, for cached inputs.
    """

    rotary: ClassVar[bool] = True
    interleaved: ClassVar[bool] = False
    tables: Callable[[Tensor], Tables]
    config: Any
    layer_idx: int
    head_dim: int
    scaling: float
    q_proj: nn.Linear
    k_proj: Any  # a KeyProjection, with plan x an InputProjection
    v_proj: InputProjection
    layer: SlimLayer
    slim: SlimValues

    @property
    def heads(self) -> int:
        """Number of heads, the same for queries and for keys and values."""
        count: int = self.config.num_attention_heads
        return count

    @property
    def values(self) -> CachedValues:
        """Module that makes values of cached tokens."""
        if self.layer.plan == "x":
            return InputValues(self.v_proj, self.heads, self.heads)
        return self.slim

    def to_cache(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and V-coordinates of inputs ``[rows, tokens, d]``, or the inputs, before any rounding."""
        if self.layer.plan == "x":
            return inputs[:, None], inputs[:, None, :, :0]
        return self.slim.to_cache(inputs, self.k_proj(inputs))

    def stored(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Keys or V-coordinates as they are cached in a dtype; in 8 bits, with their scales."""
        return store(numbers, dtype, self.head_dim)

    def numbers(self, cached: Tensor) -> Tensor:
        """Keys or V-coordinates as cached, read from 8 bits if they are stored so."""
        return load(cached, cache_dtype(self.q_proj.weight.dtype, self.layer), self.head_dim)

    def query_norm(self, query: Tensor) -> Tensor:
        """QK-norm of projected queries, ``[rows, tokens, heads * head_dim]``."""
        return query

    def key_norm(self, keys: Tensor) -> Tensor:
        """QK-norm of projected keys, ``[rows, tokens, heads * head_dim]`` in fp32; they are cached before it."""
        return keys

    def scored_query(self, query: Tensor, tables: Tables | None) -> Tensor:
        """Queries, normalised and rotated: ``[rows, heads, tokens, head_dim]`` in fp32.

        Args:
            query: ``[rows, tokens, heads * head_dim]`` as projected.
            tables: Of their positions; None without RoPE.
        """
        query = self._heads(self.query_norm(query).to(wide(query.dtype)))
        return query if tables is None else rotate(query, tables, interleaved=self.interleaved)

    def scored_keys(self, keys: Tensor, tables: Tables | None) -> Tensor:
        """Keys, normalised and rotated: ``[rows, heads, tokens, head_dim]`` in fp32.

        Args:
            keys: ``[rows, 1, tokens, heads * head_dim]`` as cached, or inputs; read from 8 bits by `numbers`.
            tables: Of their positions; None without RoPE.
        """
        if self.layer.plan == "x":
            return input_keys(keys, self.k_proj, self.heads, self.heads)
        if tables is None:  # the key offset may stay away: it adds one number to all scores of a query
            return self._heads(keys[:, 0].to(wide(keys.dtype)))
        return rotate(self._heads(self.key_norm(self.slim.rotatable(keys))), tables, interleaved=self.interleaved)

    def score_operands(
        self, query: Tensor, keys: Tensor, tables: Tables | None, *, dropout: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """Operands of the scores: few queries meet cached inputs as they are, rather than keys made of all of them.

        Args:
            query: From `scored_query`.
            keys: ``[rows, 1, tokens, heads * head_dim]`` as cached, or inputs, as numbers.
            tables: Of the keys' positions; None without RoPE.
            dropout: Share of the attention weights that is dropped, which takes the values of each token.

        Returns:
            Queries and keys, or queries and inputs, as `slim_attention` takes them.
        """
        if self.layer.plan != "x":
            return query, self.scored_keys(keys, tables)
        absorb = query.shape[2] < self.head_dim and not dropout
        return score_operands(query, keys, self.k_proj, self.heads, absorb=absorb)

    def keys_and_values(self, keys: Tensor, coordinates: Tensor, tables: Tables | None, dtype: torch.dtype) -> Segment:
        """Make the keys and values that an ordinary layer caches, ``[rows, heads, tokens, head_dim]``."""
        scored = self.scored_keys(keys, tables)
        values = self.values.per_token(keys, coordinates).unflatten(-1, (scored.shape[1], -1)).transpose(1, 2)
        return Segment(scored.to(dtype), values.to(dtype))

    def as_nodes(self, keys: Tensor, coordinates: Tensor, positions: Tensor, dtype: torch.dtype | None) -> Segment:
        """Make keys and values of cached tokens, see `MakesNodes.as_nodes`."""
        tables = self.tables(positions) if self.rotary else None
        return self.keys_and_values(
            self.numbers(keys), self.numbers(coordinates), tables, dtype or self.q_proj.weight.dtype
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
