"""Mllama, with text alone: cross-attention layers do not run where the cache holds no image.

`MllamaTextModel.forward` looks for images among the keys of all layers. Here they are those of a cache that seems to
have no layers; calls with images run stock.
"""

from __future__ import annotations

from typing import Any

from ..._compat import CACHE, cache_in
from ...attention.own_code import OwnCode


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
    output = type(module).forward(
        module, *args, **kwargs | {CACHE: _WithoutImages(cache, module.cross_attention_layers)}
    )
    output[CACHE] = cache
    return output


MLLAMA = OwnCode({"MllamaTextModel": {"forward": forward}})
