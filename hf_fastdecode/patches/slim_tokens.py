"""What a slim layer's cached tokens stand for: keys to be scored, and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..attention.kv import Segment
from .eight_bits import load, store
from .rotation import Tables, rotate
from .slim_attention import cache_dtype
from .slim_layers import SlimLayer
from .slim_values import SlimValues
from .wide_products import wide


class SlimTokens(nn.Module):
    """Norm and RoPE of a slim layer, which stand between what is cached and the scores.

    Attributes:
        rotary: Whether RoPE stands between projections and scores.
        interleaved: Whether RoPE pairs coordinates 2 i and 2 i + 1 (GPT-J, Cohere), not i and i + n of 2 n (Llama).
        tables: Makes the tables of positions ``[rows or 1, tokens]``; the decoder sets it if there is RoPE.
        layer: What the layer caches.
        slim: Values of cached tokens.
    """

    rotary: ClassVar[bool] = True
    interleaved: ClassVar[bool] = False
    tables: Callable[[Tensor], Tables]
    layer_idx: int
    head_dim: int
    scaling: float
    q_proj: nn.Linear
    layer: SlimLayer
    slim: SlimValues

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
        """Cached keys ``[rows, 1, tokens, heads * head_dim]``, as numbers, likewise."""
        if (
            tables is None
        ):  # without the key offset: it adds one number to all scores of a query, which softmax ignores
            return self._heads(keys[:, 0].to(wide(keys.dtype)))
        return rotate(self._heads(self.key_norm(self.slim.rotatable(keys))), tables, interleaved=self.interleaved)

    def keys_and_values(self, keys: Tensor, coordinates: Tensor, tables: Tables | None, dtype: torch.dtype) -> Segment:
        """What an ordinary layer caches of tokens, ``[rows, heads, tokens, head_dim]``, from numbers of this one."""
        scored = self.scored_keys(keys, tables)
        values = self.slim.per_token(keys, coordinates).unflatten(-1, (scored.shape[1], -1)).transpose(1, 2)
        return Segment(scored.to(dtype), values.to(dtype))

    def as_nodes(self, keys: Tensor, coordinates: Tensor, positions: Tensor, dtype: torch.dtype | None) -> Segment:
        """See `MakesNodes.as_nodes`."""
        tables = self.tables(positions) if self.rotary else None
        return self.keys_and_values(
            self.numbers(keys), self.numbers(coordinates), tables, dtype or self.q_proj.weight.dtype
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
