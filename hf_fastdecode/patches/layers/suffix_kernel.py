"""What slim layers cache, read by `slim_decode`, which averages cached keys without copies of them.

It reads the suffixes of a shared-context cache, and all tokens of transformers' own caches.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor, float32
from torch.utils.weak import WeakTensorKeyDictionary

from ...attention.kv import Segment
from ...attention.partial import Partial
from ...conversion.fit.cached_numbers import EIGHT_BITS, views
from ...kernels.failures import KernelFailedError
from ...kernels.slim_decode.inputs import RotaryTables, Scales, refusal
from .rotation import Rotation, takes_kernels
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
    layer: SlimTokens,
    query: Tensor,
    suffix: Segment,
    lengths: Tensor,
    tables: RotaryTables | None,
    starts: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Averages over each row's suffix, from which `partial_of` makes values.

    Args:
        layer: The attention layer.
        query: ``[rows, heads, 1, head_dim]``, normalised and rotated.
        suffix: As cached, ``[rows, 1, slots, width]`` each.
        lengths: ``[rows]`` int32, on the device: tokens in each suffix.
        tables: Tables of at least the suffixes' slots; None without RoPE.
        starts: ``[rows]`` int32, on the device: the first slot that each row sees; None for slot 0.

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
        starts=starts,
        scales=scales,
    )


def partial_of(layer: SlimTokens, averages: tuple[Tensor, Tensor, Tensor]) -> Partial:
    """Attention of each row's query to its suffix, from `averages_by_kernel`."""
    keys, coordinates, lse = averages
    dtype = cache_dtype(layer.k_proj.weight.dtype, layer.layer)
    out = layer.slim.of_averages(keys[:, :, None], coordinates[:, :, None], float32 if dtype in EIGHT_BITS else dtype)
    return Partial(out, lse[..., None])


class SeenSlots(NamedTuple):
    """Slots that the query of each row sees, ``[rows]`` int32 on the device: from `starts`, up to those of `lengths`.

    `starts` is None where rows see all slots from the first one on.
    """

    starts: Tensor | None
    lengths: Tensor


def cached_attention(
    layer: SlimTokens, query: Tensor, cached: Segment, rotation: Rotation | None, mask: Tensor | None
) -> Tensor | None:
    """Attention of a decode step over one of transformers' caches; None where `slim_decode` does not compute it.

    Then PyTorch's operators do: for several queries per row, gradients, masks that hide tokens between others or add
    to scores, devices without the kernel, and code that torch.compile traces.

    Args:
        layer: The attention layer.
        query: ``[rows, heads, queries, head_dim]``, normalised and rotated.
        cached: As the cache returns it, ``[rows, 1, slots, width]`` each.
        rotation: Tables of the pass; None without RoPE.
        mask: As `slim_attention` takes it.

    Returns:
        ``[rows, heads, 1, head_dim]`` in fp32.
    """
    tables = None if rotation is None else rotation.kernel
    if torch.compiler.is_compiling() or not takes_kernels("auto", query.device):
        return None
    if (layer.config.rotary and tables is None) or kernel_refusal(layer, query, cached) is not None:
        return None
    rows, slots = cached.keys.shape[0], cached.keys.shape[2]
    if (seen := _seen_slots(mask, rows, slots, query.device)) is None:
        return None
    try:
        averages = averages_by_kernel(layer, query, cached, seen.lengths, tables, seen.starts)
    except KernelFailedError:  # from now on a reason
        return None
    return partial_of(layer, averages).out


_seen: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
"""What `_seen_slots` found in masks that are still in use, beside their versions: all layers of a pass have one."""


def _seen_slots(mask: Tensor | None, rows: int, slots: int, device: torch.device) -> SeenSlots | None:
    """Slots that one query per row sees; None where a mask adds to scores, or a row sees none or with gaps."""
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if mask is None:
        all_slots = _all_slots.__wrapped__ if capturing else _all_slots
        stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        return SeenSlots(None, all_slots(rows, slots, device, stream))
    if mask.dtype != torch.bool or capturing or mask.dim() != 4 or mask.shape[1:] != (1, 1, slots):
        return None  # while a graph is captured, the host cannot look at a mask
    version = None if mask.is_inference() else mask._version  # inference tensors have none, and may be changed
    known, found = _seen.get(mask, (None, None))
    if version is None or known != version:
        found = _range_of(mask[:, 0, 0].expand(rows, -1))
        _seen[mask] = version, found
    return found


@lru_cache(maxsize=4)  # for all layers of a pass, whose stream has made it
def _all_slots(rows: int, slots: int, device: torch.device, stream: int) -> Tensor:
    return torch.full((rows,), slots, dtype=torch.int32, device=device)


def _range_of(seen: Tensor) -> SeenSlots | None:
    """The range of True in each row ``[rows, slots]``; None where one has none or several."""
    first = seen.byte().argmax(-1)
    end = seen.shape[1] - seen.flip(-1).byte().argmax(-1)
    if not bool((seen.sum(-1) == end - first).all()):  # a row without any has all slots from first to end
        return None
    return SeenSlots(first.int(), end.int())
