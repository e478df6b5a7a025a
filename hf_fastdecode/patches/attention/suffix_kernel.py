"""Slim suffixes by `slim_decode`, which averages cached keys without copies of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...attention.kv import ForestKV
from ...attention.partial import Partial
from ...kernels.slim_decode.limits import refusal
from ...kernels.slim_decode.scales import Scales
from ...kernels.slim_decode.tables import RotaryTables
from ..values.eight_bits import EIGHT_BITS, views
from .slim_attention import cache_dtype
from .slim_tokens import SlimTokens


class _Suffix(NamedTuple):
    """Suffixes as `slim_decode` takes them: views of what is cached, with scales if that is in 8 bits."""

    keys: Tensor
    coordinates: Tensor
    scales: Scales | None


def _suffix(layer: SlimTokens, kv: ForestKV) -> _Suffix:
    keys, coordinates = kv.suffix.keys[:, 0], kv.suffix.values[:, 0]
    dtype = cache_dtype(layer.q_proj.weight.dtype, layer.layer)
    if dtype not in EIGHT_BITS:
        return _Suffix(keys, coordinates, None)
    (keys, of_keys), (coordinates, of_coordinates) = (
        views(part, dtype, layer.head_dim) for part in (keys, coordinates)
    )
    return _Suffix(keys, coordinates, Scales(of_keys, of_coordinates))


def kernel_refusal(layer: SlimTokens, query: Tensor, kv: ForestKV) -> str | None:
    """Why `slim_decode` does not attend to a layer's suffixes; None when it does.

    Args:
        layer: The attention layer.
        query: ``[rows, heads, queries, head_dim]``, rotated.
        kv: The suffixes, as cached.
    """
    if layer.layer.plan == "x":
        return "it reads keys, and the layer caches inputs"
    if layer.config.unrotates:
        return "it reads keys of before RoPE, and slim_rope is 'unrotate'"
    if type(layer).key_norm is not SlimTokens.key_norm:
        return "keys are normalised when they are read"
    if layer.config.rotary and layer.interleaved:
        return "RoPE pairs neighbouring coordinates"
    return refusal(query, *_suffix(layer, kv)[:2])


def suffix_by_kernel(layer: SlimTokens, query: Tensor, kv: ForestKV, tables: RotaryTables | None) -> Partial:
    """Attention of each row's query, ``[rows, heads, 1, head_dim]`` fp32, to its suffix.

    Args:
        layer: The attention layer.
        query: Normalised and rotated.
        kv: The suffixes, as cached.
        tables: Of the suffixes' slots, or more; None without RoPE.
    """
    from ...kernels.slim_decode.api import slim_decode

    _, longest = kv.suffix_bounds
    keys, coordinates, scales = _suffix(layer, kv)
    if scales is not None:
        scales = Scales(*(part[:, :longest] for part in scales))
    if tables is not None:
        tables = tables._replace(cos=tables.cos[:, :longest], sin=tables.sin[:, :longest])
    averages = slim_decode(
        query.float(),
        keys[:, :longest],
        coordinates[:, :longest],
        torch.tensor(kv.lengths(), dtype=torch.int32, device=query.device),
        scale=layer.scaling,
        key_offset=layer.slim.key_offset if tables is not None else None,
        rotary=tables,
        scales=scales,
    )
    numbers = keys.dtype if scales is None else torch.float32
    out = layer.slim.of_averages(averages.keys[:, :, None], averages.coordinates[:, :, None], numbers)
    return Partial(out, averages.lse[..., None])
