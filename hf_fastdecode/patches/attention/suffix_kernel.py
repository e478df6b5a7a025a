"""Slim suffixes by `slim_decode`, which averages cached keys without copies of them."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.kv import ForestKV
from ...attention.partial import Partial
from ...kernels.slim_decode.limits import refusal
from ...kernels.slim_decode.tables import RotaryTables
from .slim_tokens import SlimTokens


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
    if kv.suffix.keys.element_size() == 1:
        return "the layer caches 8 bits"
    return refusal(query, kv.suffix.keys[:, 0], kv.suffix.values[:, 0])


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
    keys, coordinates = (part[:, 0, :longest] for part in kv.suffix)
    if tables is not None:
        tables = tables._replace(cos=tables.cos[:, :longest], sin=tables.sin[:, :longest])
    averages = slim_decode(
        query.float(),
        keys,
        coordinates,
        torch.tensor(kv.lengths(), dtype=torch.int32, device=query.device),
        scale=layer.scaling,
        key_offset=layer.slim.key_offset if tables is not None else None,
        rotary=tables,
    )
    out = layer.slim.of_averages(averages.keys[:, :, None], averages.coordinates[:, :, None], keys.dtype)
    return Partial(out, averages.lse[..., None])
