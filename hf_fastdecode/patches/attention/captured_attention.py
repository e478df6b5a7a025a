"""Attention of a slim layer in a captured decode step, by kernels that read lengths and nodes on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from ...attention.autocast import no_autocast
from ...attention.interface import SlidingWindow
from ...attention.kv import Segment
from ...attention.partial import Partial, merge
from ...cache.captured import CapturedCache
from ...errors import Unsupported
from .rotation import OF_SLOTS, Rotation
from .shared_attention import check_shared
from .slim_attention import cache_dtype
from .slim_tokens import SlimTokens
from .suffix_kernel import averages_by_kernel, kernel_refusal, partial_of


def captured_attention(
    layer: SlimTokens,
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    cache: CapturedCache,
    rotation: Rotation | None,
    mask: Tensor | SlidingWindow | None,
) -> Tensor:
    """Append a step's tokens to the suffixes, and attend to each row's path of nodes and suffix.

    Args:
        layer: The attention layer.
        query: ``[rows, 1, heads * head_dim]`` as projected.
        keys: ``[rows, 1, 1, heads * head_dim]``, not yet rounded to the cache's dtype.
        coordinates: ``[rows, 1, 1, r]``, likewise.
        cache: The cache.
        rotation: Of the step; None without RoPE.
        mask: As the model's mask function returned it.

    Returns:
        ``[rows, 1, heads * value_dim]`` in the query's dtype.

    Raises:
        Unsupported: As `shared_attention`; or the kernels do not take these.
        ValueError: The cache holds another dtype.
    """
    check_shared(layer, mask)
    dtype = query.dtype
    with no_autocast(query.device):
        stored = layer.stored(keys, coordinates, cache_dtype(dtype, layer.layer), rotation)
        to_suffix = layer.scored_query(query, rotation and rotation.own_tokens)
        averages = _append_and_average(layer, cache, stored, to_suffix)
        merged = partial_of(layer, averages)
        if cache.has_nodes:
            to_nodes = layer.scored_query(query, rotation and rotation.tokens).to(dtype)
            merged = merge(merged, _attend_to_nodes(layer, cache, to_nodes))
    return merged.out.transpose(1, 2).flatten(2).to(dtype)


# Kernels and caches are not compiled: what reads and writes fixed addresses has nothing to fuse.


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _append_and_average(
    layer: SlimTokens, cache: CapturedCache, stored: Segment, query: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    suffix = cache.append_in_place(layer.layer_idx, stored)
    if reason := kernel_refusal(layer, query, suffix):
        raise Unsupported(reason)
    # Not an argument: compiled code would be made again for each number of slots.
    tables = cache.constants[OF_SLOTS] if layer.config.rotary else None
    return averages_by_kernel(layer, query, suffix, cache.after, tables)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _attend_to_nodes(layer: SlimTokens, cache: CapturedCache, query: Tensor) -> Partial:
    return cache.attend_nodes(layer.layer_idx, query, layer.scaling)
