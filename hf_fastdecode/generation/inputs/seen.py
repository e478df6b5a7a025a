"""Images that layers of a decoder's own attend to, see `cache.layers.images`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from ...cache.layers.images import ImageInputs
from ...errors import Unsupported
from ..call_context import CallContext
from .encoded import FoundInputs
from .given import image_mask_of

UNCONTINUED: Final = "layers of their own attend to images, which no kept cache holds"
"""Why a call with such images takes no cache."""


def mask_of_images(call: CallContext) -> str | None:
    """As `image_mask_of`, of a call with images; None for others."""
    return None if call.inputs is None else image_mask_of(call.model)


def images_of_layers(call: CallContext, rows: Sequence[int]) -> FoundInputs | None:
    """Storage for the images of distinct prompts that layers of the model's own attend to, if there are such.

    Args:
        rows: Rows of each distinct prompt, whose images are its own.

    Raises:
        Unsupported: The call has them in another form.
    """
    if call.inputs is None or (mask := image_mask_of(call.model)) is None:
        return None
    pixels = call.inputs.arguments.get("pixel_values")
    if not isinstance(pixels, Tensor) or pixels.dim() != 6:
        raise Unsupported("its images are not pixel_values [rows, images, tiles, channels, height, width]")
    text, vision = call.structure.text_config, call.model.config.vision_config
    tokens = pixels.shape[1] * pixels.shape[2] * ((vision.image_size // vision.patch_size) ** 2 + 1)
    layers, heads = text.cross_attention_layers, text.num_attention_heads
    of_rows = torch.arange(len(rows), device="cpu").repeat_interleave(torch.tensor(rows, device="cpu"))
    return FoundInputs(ImageInputs(len(rows), tokens, layers, heads, mask), of_rows)
