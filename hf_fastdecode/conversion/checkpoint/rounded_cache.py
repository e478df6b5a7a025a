"""A cache of ordinary models that rounds keys and values to another dtype, to measure the error of that dtype."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from hf_fastdecode.conversion.fit.eight_bits import load, store


class RoundedCache(DynamicCache):
    """A cache whose keys and values have the errors of a dtype's, to measure what it costs; it saves no memory.

    transformers' `QuantizedCache` hands the prompt to attention as it was, and other backends than fp8 keep the latest
    tokens so: it would not tell what a dtype costs alone.

    Args:
        config: Of the model; None for a cache without sliding windows.
        dtype: Of the cache that is measured; in 8 bits with a scale per token and head, as slim caches have it.
        layers: Which are rounded; None for all.
    """

    def __init__(self, config: Any, dtype: torch.dtype, layers: Collection[int] | None = None) -> None:
        super().__init__(config=config)
        self.dtype, self.rounded_layers = dtype, layers

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values ``[rows, kv_heads, tokens, head_dim]``, rounded, and return all of them."""
        if self.rounded_layers is None or layer_idx in self.rounded_layers:
            key_states, value_states = map(self._round, (key_states, value_states))
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def _round(self, x: Tensor) -> Tensor:
        head_dim = x.shape[-1]
        return load(store(x, self.dtype, head_dim), self.dtype, head_dim).to(x.dtype)
