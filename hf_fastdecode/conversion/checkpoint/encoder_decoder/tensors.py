"""Tensors of an attention of the decoder, ordinary and slim."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ....patches.layers.encoder_decoder import EncoderDecoder
from ..slim_layer import recover_values


def below(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors whose names have a prefix, by the rest of their names."""
    return {name.removeprefix(prefix): one for name, one in tensors.items() if name.startswith(prefix)}


def full_tensors(family: EncoderDecoder, own: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors of an ordinary attention, from those of `ConvertedLayer.attention`; values' projection up to rounding.

    Args:
        family: Of the model.
        own: Of the slim attention, by names below it.
        dtype: Of the ordinary model.
    """
    plain = {name: one.to(dtype) for name, one in own.items() if not name.startswith("slim.")}
    if len(plain) == len(own):
        return plain
    key, value = family.projection("k"), family.projection("v")
    weight, bias = recover_values(own[f"{key}.weight"], own.get(f"{key}.bias"), dict(own))
    plain[f"{value}.weight"] = weight.to(dtype)
    if f"{family.projection('o')}.bias" in own:  # in Whisper, values have a bias and keys have none
        plain[f"{value}.bias"] = bias.to(dtype)
    return plain
