"""What a slim checkpoint caches, from its config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch

from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.patches.layers.slim_attention import cache_dtype
from hf_fastdecode.patches.slim_layers import SlimLayer

from ...patches.layers.family import language_config
from ..families import ordinary_config
from ..fit.cached_numbers import position_bytes, stored_bytes
from .model_caches import ON_CHIP, READ, CacheSize, value_matrices

NAME: Final = "slim"


@dataclass(frozen=True)
class LayerCache:
    """Plan, dtype and bytes per token of the cache of one attention of a slim checkpoint.

    Bytes include scales of 8 bits and cached positions, and are 0 for the encoder's output, which all layers share.
    """

    layer: SlimLayer
    dtype: torch.dtype
    bytes_per_token: int


def layer_caches(config: Any, dtype: torch.dtype) -> list[LayerCache]:
    """The cache of each layer of a slim config; self-attention and cross-attention of encoder-decoders alternate."""
    shape, language = KVSizes.of_decoder(ordinary_config(config)).same, language_config(config)
    width = shape.query_heads * shape.head_dim
    found = []
    for layer in language.layer_plans:
        stored_in = cache_dtype(dtype, layer) if layer.plan != "kv" else dtype
        numbers = {"kv": (width, width), "x": (language.hidden_size,), "e": ()}.get(layer.plan, (width, layer.rank))
        size = sum(stored_bytes(one, stored_in, shape.head_dim) for one in numbers)
        if layer.plan in ("k", "k+r") and language.unrotates:
            size += position_bytes(stored_in)
        found.append(LayerCache(layer, stored_in, size))
    return found


def checkpoint_caches(
    config: Any, context: int, encoder_tokens: int | None, dtype: torch.dtype, kv: CacheSize
) -> list[CacheSize]:
    """The caches of all layers; where layers read the encoder's output E, twice, as in `encoder_decoder_caches`.

    Of a slim config, for rows of `context` tokens in the decoder and `encoder_tokens` in E, None for decoder-only
    models, in a model's dtype; `kv` are keys and values of the ordinary model.
    """
    caches, language = layer_caches(config, dtype), language_config(config)
    sizes = KVSizes.of_decoder(ordinary_config(config))
    kept, shape = sizes.kv_bytes(1, context, 0, 1).stock // sizes.bytes_per_token(1), sizes.same  # tokens, in a window
    inputs, width = language.hidden_size, shape.query_heads * shape.head_dim
    projection, matrix_dtype = inputs * width * dtype.itemsize, getattr(torch, language.slim_matrix_dtype)
    stored = change = 0
    for index, cache in enumerate(caches):
        plan, rank = cache.layer.plan, cache.layer.rank
        cross = encoder_tokens is not None and index % 2 == 1
        stored += cache.bytes_per_token * (encoder_tokens or 0 if cross else kept)
        if plan == "e":
            change += 2 * projection
        elif plan in ("k", "k+r"):  # V-coordinates of the encoder's output are made once, before the steps
            change += value_matrices(0 if cross else inputs, width, rank, matrix_dtype) - (0 if cross else projection)
    matrices = None if kv.matrices is None else kv.matrices + change
    readers = sum(cache.layer.plan == "e" for cache in caches)
    if not readers or encoder_tokens is None:
        return [CacheSize(NAME, stored, stored, matrices)]
    encoder = encoder_tokens * inputs * dtype.itemsize
    return [
        CacheSize(f"{NAME}, {place}", stored + encoder, stored + read, matrices)
        for place, read in ((ON_CHIP, 0), (READ, readers * encoder))
    ]
