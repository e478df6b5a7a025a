"""Caches that a model may have: bytes stored, and bytes that a generated token reads, from a config alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_fastdecode.cache.accounting import KVSizes
from hf_fastdecode.patches.config_base import SlimLayer
from hf_fastdecode.patches.layers.slim_attention import cache_dtype
from hf_fastdecode.patches.layers.slim_values import SlimValues

from ..model_loading import auto_class
from ..patches.layers.family import language_config
from .families import ordinary_config, refusal
from .fit.cached_numbers import position_bytes, stored_bytes
from .fit.layer_plan import RANK_SHARES, share_name
from .fit.value_coordinates import matrix_dtype

KV: Final = "keys and values"
OPTION_1: Final = "keys (option 1)"
ON_CHIP: Final = "E on chip"
READ: Final = "E read"
_INT8_GROUP: Final = 64  # elements per scale, as transformers' QuantizedCache groups them
_SCALE_BYTES: Final = 2


@dataclass(frozen=True)
class CacheSize:
    """One kind of cache of a model, for one row: bytes stored in memory, and bytes of it that a step reads.

    `matrices` are bytes of weight matrices that a step reads, once for all rows; None when unknown.
    """

    name: str
    stored: int
    read: int
    matrices: int | None

    def reads(self, rows: int) -> float | None:
        """Bytes read per generated token: a row's cache, and its share of the matrices (section 7); or None."""
        return None if self.matrices is None else self.read + self.matrices / rows


def _int8_size(elements: int, matrices: int | None) -> CacheSize:
    """Keys and values of a row in int8, with a scale in half precision for each 64 elements."""
    stored = elements + _SCALE_BYTES * -(-elements // _INT8_GROUP)
    return CacheSize("int8 keys and values", stored, stored, matrices)


def value_matrices(inputs: int, width: int, rank: int, dtype: torch.dtype) -> int:
    """Bytes of the matrices that replace ``W_V`` in a slim layer: ``W_KV``, and two for V-coordinates.

    Of inputs of width d, keys and values of width e, and r V-coordinates, in the matrices' dtype.
    """
    with torch.device("meta"):
        values = SlimValues(inputs, width, width, rank, dtype)
    return sum(one.nbytes for one in values.buffers() if one.dim() == 2)


def decoder_caches(config: Any, context: int, dtype: torch.dtype, matrices: int | None) -> list[CacheSize]:
    """Keys and values; slim caches, where the converter takes the model; keys and values in int8.

    Of a decoder-only model of a dtype (float32, bfloat16 or float16), for a row of `context` tokens. `matrices` are
    the elements of the matrices that a step reads, or None when unknown. Raises ValueError as `KVSizes.from_config`.
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
    return [*sizes, _int8_size(kv // dtype.itemsize, bytes_read)]


def encoder_decoder_caches(
    config: Any, context: int, encoder_tokens: int, dtype: torch.dtype, matrices: int | None
) -> list[CacheSize]:
    """The caches of Slim attention, section 7, for self-attention and cross-attention together.

    Keys and values; option 1, keys, for multi-head attention; option 2, the encoder's output E, once for all
    cross-attention layers, on chip as in the paper, or read from memory by every layer; keys and values in int8.
    Beside E, self-attention caches keys; or its inputs where these are narrower and there is no RoPE (section 6); or
    keys and values, where heads are grouped. Arguments and errors are as of `decoder_caches`; `context` is the
    decoder's, `encoder_tokens` are those of E, and `matrices` are the decoder's, cross-attention's included.
    """
    counted, size = KVSizes.of_decoder(config), dtype.itemsize
    shape = counted.same
    text = config.get_text_config(decoder=True)
    inputs, width = text.hidden_size, shape.query_heads * shape.head_dim
    encoder_width = getattr(text, "cross_attention_hidden_size", None) or inputs
    kv_width = 2 * counted.layers * shape.kv_heads * shape.head_dim  # keys and values of a token, over all layers
    cross_kv, encoder = encoder_tokens * kv_width * size, encoder_tokens * encoder_width * size
    self_kv = counted.kv_bytes(1, context, 0, size).stock
    projections = kv_width * encoder_width * size
    baseline = None if matrices is None else matrices * size - projections

    def cache(name: str, stored: int, read: int, more: int) -> CacheSize:
        return CacheSize(name, stored, read, None if baseline is None else baseline + more)

    solved = counted.layers * value_matrices(inputs, width, 0, matrix_dtype(dtype))  # W_KV of self-attention, for W_V
    self_change = solved - counted.layers * inputs * width * size
    sizes = [cache(KV, cross_kv + self_kv, cross_kv + self_kv, 0)]
    kept, self_stored, change = KV, self_kv, 0
    if shape.attention == "MHA":
        kept, self_stored, change = "keys", self_kv // 2, self_change
        stored = self_stored + cross_kv // 2
        sizes.append(cache(OPTION_1, stored, stored, solved + self_change))
    if inputs < width and getattr(text, "rope_parameters", None) is None:
        kept, self_stored, change = "inputs", self_kv // (2 * shape.kv_heads * shape.head_dim) * inputs, 0
    for label, read in ((ON_CHIP, 0), (READ, counted.layers * encoder)):
        sizes.append(cache(f"{label}, {kept}", self_stored + encoder, self_stored + read, projections + change))
    return [*sizes, _int8_size((cross_kv + self_kv) // size, baseline)]


def empty_model(config: Any) -> PreTrainedModel:
    """A model of a config on the meta device, in eval mode; its code may raise anything."""
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=False).eval()


def decoder_matrices(model: PreTrainedModel) -> int:
    """Elements of the matrices of the decoder's layers and of the output head (Slim attention, section 7).

    Without biases and norms, and without embedding tables, of which a step reads a row, unless they are the head's
    matrix too. All experts of a mixture are counted.
    """
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    tables = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
    matrices = {id(one): one.numel() for one in decoder.parameters() if one.dim() >= 2 and id(one) not in tables}
    return sum((matrices | {id(head.weight): head.weight.numel()}).values())


SLIM: Final = "slim"


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
        widths = {"kv": (width, width), "x": (language.hidden_size,), "e": ()}.get(layer.plan, (width, layer.rank))
        size = sum(stored_bytes(one, stored_in, shape.head_dim) for one in widths)
        if layer.plan in ("k", "k+r") and language.unrotates:
            size += position_bytes(stored_in)
        found.append(LayerCache(layer, stored_in, size))
    return found


def checkpoint_caches(
    config: Any, context: int, encoder_tokens: int | None, dtype: torch.dtype, kv: CacheSize
) -> list[CacheSize]:
    """The caches of all layers of a slim config; where layers read the encoder's output E, with E on chip and read.

    For rows of `context` tokens in the decoder and `encoder_tokens` in E, None for decoder-only models, in a model's
    dtype; `kv` are keys and values of the ordinary model.
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
        return [CacheSize(SLIM, stored, stored, matrices)]
    encoder = encoder_tokens * inputs * dtype.itemsize
    return [
        CacheSize(f"{SLIM}, {label}", stored + encoder, stored + read, matrices)
        for label, read in ((ON_CHIP, 0), (READ, readers * encoder))
    ]
