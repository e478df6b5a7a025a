"""Caches for cross-attention (Slim attention, section 7).

Option 1 caches keys of the encoder's output E per layer, which is `value_coordinates` with E as the inputs of keys.
Option 2 caches E once for all layers, which is `inputs_cache_output` with E as what is cached. The hybrid caches the
keys of one layer, and the others take those for E.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch

from .key_to_value import solve_key_to_value
from .weights import AttentionWeights, require_linear_scores, require_multi_head

CrossCache = Literal["kv", "k", "encoder", "hybrid"]
"""Keys and values per layer; keys per layer (option 1); the encoder's output (option 2); keys of one layer."""


def hybrid_layers(layers: Sequence[AttentionWeights], source: int = 0) -> tuple[AttentionWeights, ...]:
    """Rewrite layers so that all of them attend to the cached keys of one, in the place of the encoder's output.

    The cache is ``K = E W_K,source``, without bias. Every layer's key and value projections become
    ``W_K,source^-1 W_K`` and ``W_K,source^-1 W_V``: the source's own key projection becomes the identity (so that its
    queries score the cache as they are) and its value projection ``W_KV``. Hand the result and the cache to
    `inputs_cache_output`.

    The inverse is that of keys alone, whose sensitivity to rounding is `KeyToValue.condition`: it is exact, but a
    cache in half precision suits few trained layers.

    Args:
        layers: Cross-attention of all decoder layers, without RoPE and QK-norm; those other than the source may be
            grouped-query.
        source: Index of the layer whose keys are cached; it must be multi-head.

    Returns:
        The layers with new ``key`` and ``value``, fp64.

    Raises:
        ValueError: RoPE or QK-norm makes scores not bilinear, or the source's keys do not determine E.
    """
    for layer in layers:
        require_linear_scores(layer, None)
    cached = layers[source]
    require_multi_head(cached)
    rewritten = []
    for layer in layers:
        width = layer.key.shape[0]
        both = solve_key_to_value(cached.W_K, torch.cat([layer.W_K, layer.W_V], 1)).matrix
        rewritten.append(replace(layer, key=both[:, :width].mT, value=both[:, width:].mT))
    return tuple(rewritten)


def cross_cache_width(layers: Sequence[AttentionWeights], cache: CrossCache) -> int:
    """Numbers cached per token of the encoder's output, over all decoder layers (the table of section 7).

    Args:
        layers: Cross-attention of all decoder layers.
        cache: What is cached.
    """
    if cache == "encoder":
        return layers[0].key.shape[1]
    if cache == "hybrid":
        return layers[0].key.shape[0]
    values = sum(layer.value.shape[0] for layer in layers) if cache == "kv" else 0
    return sum(layer.key.shape[0] for layer in layers) + values
