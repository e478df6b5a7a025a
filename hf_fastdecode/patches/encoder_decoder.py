"""Base class of encoder-decoder models with slim attention in the decoder; the encoder caches nothing and stays."""

from __future__ import annotations

from typing import Any, ClassVar

from transformers.modeling_utils import PreTrainedModel

from .attention.decoder_attention import SlimDecoderAttention


class SlimEncoderDecoder(PreTrainedModel):
    """An encoder-decoder model with slim layers in its decoder, before the architecture's own among base classes.

    Args:
        config: Of the model.

    Attributes:
        slim_attention: Class of the slim attentions.
        blocks: Name of the decoder's list of layers.
        self_attention, cross_attention: Paths below a layer.
    """

    slim_attention: ClassVar[type[SlimDecoderAttention]]
    blocks: ClassVar[str] = "layers"
    self_attention: ClassVar[str] = "self_attn"
    cross_attention: ClassVar[str] = "encoder_attn"

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        plans = iter(config.layer_plans)
        for block in getattr(self.get_decoder(), self.blocks):
            for path in (self.self_attention, self.cross_attention):
                if (layer := next(plans)).plan != "kv":
                    ordinary, cross = block.get_submodule(path), path == self.cross_attention
                    attention = self.slim_attention.in_place_of(ordinary, layer, cross)
                    attention.config = config  # the decoder of T5 has a copy, to which later changes do not come
                    block.set_submodule(path, attention)
        self.post_init()
