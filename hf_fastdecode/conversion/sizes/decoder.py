"""Caches that a decoder-only model may have."""

from __future__ import annotations

from typing import Any

import torch

from hf_fastdecode.cache.accounting import KVSizes

from ...patches.layers.family import language_config
from ..checkpoint.families.lookup import UnconvertibleError, family_of
from ..checkpoint.slim_layer import matrix_dtype
from ..fit.layer_plan import RANK_SHARES, share_name
from .cache_size import KV, CacheSize, int8_size, value_matrices


def refusal(config: Any) -> str | None:
    """Why `convert_checkpoint` refuses a model of a config, or None."""
    try:
        family_of(config)
    except UnconvertibleError as error:
        return str(error)
    return None


def decoder_caches(config: Any, context: int, dtype: torch.dtype, matrices: int | None) -> list[CacheSize]:
    """Keys and values; slim caches, where the converter takes the model; keys and values in int8.

    Args:
        config: Of a decoder-only model.
        context: Tokens of a row.
        dtype: Of the model: float32, bfloat16 or float16.
        matrices: Numbers in the matrices that a step reads, or None when unknown.

    Raises:
        ValueError: As of `KVSizes.from_config`.
    """
    counted = KVSizes.from_config(config)
    bytes_read = None if matrices is None else matrices * dtype.itemsize
    kv = counted.kv_bytes(1, context, 0, dtype.itemsize).stock
    sizes = [CacheSize(KV, kv, kv, bytes_read)]
    if refusal(config) is None:
        shape = counted.same
        inputs, width = language_config(config).hidden_size, shape.query_heads * shape.head_dim
        keys, W_V = kv // 2, inputs * width * dtype.itemsize
        ranks = {int(width * share): f"keys + {share_name(share)}" for share in RANK_SHARES}
        names = {**ranks, 0: "keys"}
        for rank, name in sorted(names.items()):
            stored = keys + keys // width * rank
            change = counted.layers * (value_matrices(inputs, width, rank, matrix_dtype(dtype)) - W_V)
            sizes.append(CacheSize(name, stored, stored, None if bytes_read is None else bytes_read + change))
    return [*sizes, int8_size(kv // dtype.itemsize, bytes_read)]
