"""Mllama, Gemma 3n and Kosmos-2: methods of text models beside their attention."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._compat import CACHE, cache_in
from ...attention.own_code import Method, OwnCode
from ...cache.layers.cross import ImageView


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


def run_mllama(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Stands in for `MllamaTextModel.forward`, which its callers hand the cache by name.

    It looks for images among the keys of all layers. Cross-attention layers find images where the cache holds some,
    and do not run where it holds none. With text alone the keys are those of a cache that seems to have no layers.
    """
    cache = cache_in(kwargs)
    if isinstance(cache, ImageView):
        return type(module).forward(module, *args, **kwargs)
    output = type(module).forward(
        module, *args, **kwargs | {CACHE: _WithoutImages(cache, module.cross_attention_layers)}
    )
    output[CACHE] = cache
    return output


def gaussian_topk(module: Any, inputs: Tensor) -> Tensor:
    """Stands in for `Gemma3nTextMLP._gaussian_topk`: the largest of ``[..., inputs]`` above a quantile, else 0.

    It copies its share of zeros to the device in every pass, which no CUDA graph can hold.
    """
    mean, deviation = inputs.mean(-1, keepdim=True), inputs.std(-1, keepdim=True, unbiased=False)
    return F.relu(inputs - (mean + deviation * _quantile(module.activation_sparsity, inputs.dtype)))


@cache
def _quantile(share: float, dtype: torch.dtype) -> float:
    """The quantile of the normal distribution below which this share lies, as rounded by transformers."""
    exact = torch.distributions.Normal(0, 1).icdf(torch.tensor(share, dtype=torch.float32, device="cpu"))
    return float(exact.to(dtype))


def no_mask(module: Any, *args: Any, **kwargs: Any) -> None:
    """Stands in for `Kosmos2TextTransformer._prepare_decoder_attention_mask`, which is causal and hides padding."""


def _of_kosmos(stand_ins: Mapping[str, Mapping[str, Method]]) -> OwnCode:
    return OwnCode(
        stand_ins,
        places_tokens=True,
        not_captured="it derives positions from the length of the cache, which a graph would keep",
    )


MULTIMODAL = {
    "gemma3n": OwnCode({"Gemma3nTextMLP": {"_gaussian_topk": gaussian_topk}}),
    "kosmos2": _of_kosmos({"Kosmos2TextTransformer": {"_prepare_decoder_attention_mask": no_mask}}),
    "kosmos2_5": _of_kosmos({}),
    "mllama": OwnCode({"MllamaTextModel": {"forward": run_mllama}}, image_mask="cross_attention_mask"),
}
"""By folder of ``transformers.models``."""
