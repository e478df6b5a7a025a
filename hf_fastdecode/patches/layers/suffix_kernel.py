"""Slim suffixes by `slim_decode`, which averages cached keys without copies of them."""

from __future__ import annotations

from torch import Tensor, float32

from ...attention.kv import Segment
from ...attention.partial import Partial
from ...conversion.fit.cached_numbers import EIGHT_BITS, views
from ...kernels.slim_decode.inputs import RotaryTables, Scales, refusal
from .slim_attention import cache_dtype
from .slim_tokens import SlimTokens


def _suffix(layer: SlimTokens, stored: Segment) -> tuple[Tensor, Tensor, Scales | None]:
    """Keys and V-coordinates as `slim_decode` takes them: views of what is cached, with scales if it is in 8 bits."""
    keys, coordinates = (part[:, 0] for part in stored)
    dtype = cache_dtype(layer.k_proj.weight.dtype, layer.layer)
    if dtype not in EIGHT_BITS:
        return keys, coordinates, None
    (keys, of_keys), (coordinates, of_coordinates) = (
        views(part, dtype, layer.head_dim) for part in (keys, coordinates)
    )
    return keys, coordinates, Scales(of_keys, of_coordinates)


def layer_refusal(layer: SlimTokens) -> str | None:
    """Why `slim_decode` never attends to a layer's suffixes; None when it may."""
    if layer.layer.plan == "x":
        return "it reads keys, and the layer caches inputs"
    if layer.config.unrotates:
        return "it reads keys of before RoPE, and slim_rope is 'unrotate'"
    if layer.normalizes_keys:
        return "keys are normalised when they are read"
    if layer.config.rotary and layer.interleaved:
        return "RoPE pairs neighbouring coordinates"
    return None


def kernel_refusal(layer: SlimTokens, query: Tensor, suffix: Segment) -> str | None:
    """Why `slim_decode` does not attend to a layer's suffixes; None when it does; as `averages_by_kernel`."""
    return layer_refusal(layer) or refusal(query, *_suffix(layer, suffix)[:2])


def averages_by_kernel(
    layer: SlimTokens, query: Tensor, suffix: Segment, lengths: Tensor, tables: RotaryTables | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Averages over each row's suffix, from which `partial_of` makes values.

    Args:
        layer: The attention layer.
        query: ``[rows, heads, 1, head_dim]``, normalised and rotated.
        suffix: As cached, ``[rows, 1, slots, width]`` each.
        lengths: ``[rows]`` int32, on the device: tokens in each suffix.
        tables: Tables of at least the suffixes' slots; None without RoPE.

    Returns:
        Averages of keys ``[rows, heads, e]`` and V-coordinates ``[rows, heads, r]``, and the log-sum-exp
        ``[rows, heads]``.
    """
    from ...kernels.slim_decode.api import slim_decode

    keys, coordinates, scales = _suffix(layer, suffix)
    if tables is not None:
        slots = keys.shape[1]
        tables = tables._replace(cos=tables.cos[:, :slots], sin=tables.sin[:, :slots])
    return slim_decode(
        query.float(),
        keys,
        coordinates,
        lengths,
        scale=layer.scaling,
        key_offset=layer.slim.key_offset if tables is not None else None,
        rotary=tables,
        scales=scales,
    )


def partial_of(layer: SlimTokens, averages: tuple[Tensor, Tensor, Tensor]) -> Partial:
    """Attention of each row's query to its suffix, from `averages_by_kernel`."""
    keys, coordinates, lse = averages
    dtype = cache_dtype(layer.k_proj.weight.dtype, layer.layer)
    out = layer.slim.of_averages(keys[:, :, None], coordinates[:, :, None], float32 if dtype in EIGHT_BITS else dtype)
    return Partial(out, lse[..., None])
