"""Images that layers of a decoder's own attend to, see `cache.layers.images`."""

from __future__ import annotations

from transformers import PreTrainedModel

from ...attention.own_code import own_code_of
from ...cache.layers.images import ImageInputs
from ..call_context import CallContext


def attends_to_images(model: PreTrainedModel) -> bool:
    """Whether layers of the model's own attend to images, see `OwnCode.image_mask`."""
    own = own_code_of(type(model))
    return own is not None and own.image_mask is not None


def images_of_layers(call: CallContext, prompts: int) -> ImageInputs | None:
    """Storage for the images that layers of the model's own attend to, of so many distinct prompts, if it has such."""
    own = own_code_of(type(call.model))
    if call.inputs is None or own is None or own.image_mask is None:
        return None
    text, vision = call.structure.text_config, call.model.config.vision_config
    _, images, tiles, *_ = call.inputs.arguments["pixel_values"].shape
    tokens = images * tiles * ((vision.image_size // vision.patch_size) ** 2 + 1)
    layers, heads = text.cross_attention_layers, text.num_attention_heads
    return ImageInputs(prompts, tokens, layers, heads, own.image_mask)
