"""Attention of a slim layer in a captured decode step, by kernels that read lengths and nodes on the device."""

from __future__ import annotations

from torch import Tensor

from ...attention.autocast import no_autocast
from ...attention.interface import SlidingWindow
from ...attention.partial import merge
from ...cache.captured import CapturedCache
from ...unsupported import Unsupported
from .forest_attention import check_shared
from .rotation import Rotation
from .slim_attention import cache_dtype
from .slim_tokens import SlimTokens
from .suffix_kernel import kernel_refusal, suffix_by_kernel


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
        Unsupported: As `forest_attention`; or the kernels do not take these.
        ValueError: The cache holds another dtype.
    """
    check_shared(layer, mask)
    dtype = query.dtype
    with no_autocast(query.device):
        stored = layer.stored(keys, coordinates, cache_dtype(dtype, layer.layer), rotation)
        suffix = cache.append_in_place(layer.layer_idx, stored)
        to_suffix = layer.scored_query(query, rotation and rotation.own_tokens)
        if reason := kernel_refusal(layer, to_suffix, suffix):
            raise Unsupported(reason)
        merged = suffix_by_kernel(layer, to_suffix, suffix, cache.after, rotation and rotation.kernel)
        if cache.has_nodes:
            to_nodes = layer.scored_query(query, rotation and rotation.tokens).to(dtype)
            merged = merge(merged, cache.attend_nodes(layer.layer_idx, to_nodes, layer.scaling))
    return merged.out.transpose(1, 2).flatten(2).to(dtype)
