"""Caches that an encoder-decoder may have (Slim attention, section 7)."""

from __future__ import annotations

from typing import Any, Final

import torch

from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.cache.layout import Store

from ..checkpoint.slim_layer import matrix_dtype
from ..fit.cross_attention import cross_cache_width
from ..fit.weights import AttentionWeights
from .cache_size import KV, CacheSize, int8_size, value_matrices

OPTION_1: Final = "keys (option 1)"
ON_CHIP: Final = "E on chip"
READ: Final = "E read"


def encoder_decoder_caches(
    config: Any, context: int, encoder_tokens: int, dtype: torch.dtype, matrices: int | None
) -> list[CacheSize]:
    """The caches of section 7, for self-attention and cross-attention together.

    - Keys and values.
    - Option 1: keys, for multi-head attention.
    - Option 2: the encoder's output E, once for all cross-attention layers. For self-attention keys; or its inputs
      where these are narrower and there is no RoPE (section 6); or keys and values, where heads are grouped. It is
      counted twice: with E on chip, as the paper has it, where a step reads none of it from memory; and with E read
      from memory by every layer.
    - Keys and values in int8.

    Args:
        config: Of an encoder-decoder.
        context: Tokens that the decoder has in a row.
        encoder_tokens: Tokens of the encoder's output in a row.
        dtype: Of the model: float32, bfloat16 or float16.
        matrices: Numbers in the decoder's matrices, cross-attention's included, or None when unknown.

    Raises:
        ValueError: As of `KVSizes.of_decoder`.
    """
    counted, size = KVSizes.of_decoder(config), dtype.itemsize
    shape = counted.same
    text = config.get_text_config(decoder=True)
    layers = _cross_layers(text, shape) * counted.layers
    inputs, width = text.hidden_size, shape.query_heads * shape.head_dim
    cross_kv, encoder = (encoder_tokens * cross_cache_width(layers, cache) * size for cache in ("kv", "encoder"))
    self_kv = counted.kv_bytes(1, context, 0, size).stock
    projections = sum(layer.key.numel() + layer.value.numel() for layer in layers) * size
    baseline = None if matrices is None else matrices * size - projections

    def cache(name: str, stored: int, read: int, more: int) -> CacheSize:
        return CacheSize(name, stored, read, None if baseline is None else baseline + more)

    solved = counted.layers * value_matrices(inputs, width, 0, matrix_dtype(dtype))  # W_KV of self-attention, for W_V
    self_change = solved - counted.layers * inputs * width * size
    sizes = [cache(KV, cross_kv + self_kv, cross_kv + self_kv, 0)]
    kept, own, change = KV, self_kv, 0
    if shape.attention == "MHA":
        stored = encoder_tokens * cross_cache_width(layers, "k") * size + self_kv // 2
        sizes.append(cache(OPTION_1, stored, stored, solved + self_change))
        kept, own, change = "keys", self_kv // 2, self_change
    if inputs < width and getattr(text, "rope_parameters", None) is None:
        kept, own, change = "inputs", self_kv // (2 * shape.kv_heads * shape.head_dim) * inputs, 0
    for place, read in ((ON_CHIP, 0), (READ, len(layers) * encoder)):
        sizes.append(cache(f"{place}, {kept}", own + encoder, own + read, projections + change))
    return [*sizes, int8_size((cross_kv + self_kv) // size, baseline)]


def _cross_layers(config: Any, shape: Store) -> list[AttentionWeights]:
    """Cross-attention of a layer of the decoder, without memory for the weights."""
    encoder_width = getattr(config, "cross_attention_hidden_size", None) or config.hidden_size
    width, kv_width = shape.query_heads * shape.head_dim, shape.kv_heads * shape.head_dim
    with torch.device("meta"):
        key = torch.empty(kv_width, encoder_width)
        query, output = torch.empty(width, config.hidden_size), torch.empty(config.hidden_size, width)
    return [AttentionWeights(query, key, key, output, shape.query_heads, shape.kv_heads)]
