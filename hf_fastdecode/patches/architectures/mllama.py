"""Mllama: cross-attention layers find images where the cache holds some, and do not run where it holds none.

`MllamaTextModel.forward` looks for images among the keys of all layers. With text alone they are those of a cache that
seems to have no layers.
"""

from __future__ import annotations

from typing import Any

from ..._compat import CACHE, cache_in
from ...attention.own_code import OwnCode
from ...cache.layers.images import ImageView


class _WithoutImages:
    """A cache of text, in which cross-attention layers find nothing.

    Args:
        cache: A shared-context cache, or what stands for one in a capture.
        images: Indices of cross-attention layers.
    """

    layers = ()

    def __init__(self, cache: Any, images: Any):
        self._cache, self._images = cache, frozenset(images)

    def get_seq_length(self, layer_idx: int | None = None) -> int:
        return 0 if layer_idx in self._images else int(self._cache.get_seq_length())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `MllamaTextModel.forward`, which its callers hand the cache by name."""
    cache = cache_in(kwargs)
    if isinstance(cache, ImageView):
        return type(module).forward(module, *args, **kwargs)
    output = type(module).forward(
        module, *args, **kwargs | {CACHE: _WithoutImages(cache, module.cross_attention_layers)}
    )
    output[CACHE] = cache
    return output


MLLAMA = OwnCode({"MllamaTextModel": {"forward": forward}}, image_mask="cross_attention_mask")
