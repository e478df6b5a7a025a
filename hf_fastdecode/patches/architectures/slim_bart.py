"""BART with slim attention in the decoder: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from transformers.models.bart.modeling_bart import (
    BartAttention,
    BartForConditionalGeneration,
    BartModel,
    BartPreTrainedModel,
)

from ..decoder import SlimEncoderDecoder
from ..encoder_decoder_configs import SlimBartConfig
from ..layers.decoder_attention import SlimDecoderAttention
from ..layers.family import EncoderDecoder


class SlimBartAttention(SlimDecoderAttention, BartAttention):
    """Attention of a decoder layer that caches no values."""


class SlimBartPreTrainedModel(SlimEncoderDecoder, BartPreTrainedModel):
    """Base class of the models."""

    config_class = SlimBartConfig
    slim_attention = SlimBartAttention


class SlimBartModel(SlimBartPreTrainedModel, BartModel):
    """BART's encoder and decoder, with slim attention."""


class SlimBartForConditionalGeneration(SlimBartPreTrainedModel, BartForConditionalGeneration):
    """BART for generation, with slim attention."""


FAMILY = EncoderDecoder(
    "BartForConditionalGeneration",
    SlimBartForConditionalGeneration,
    SlimBartConfig,
    SlimBartModel,
    embedding="model.shared.weight",
    decoder="model.decoder.",
    renamed={start: f"model.{start}" for start in ("shared.", "encoder.", "decoder.")},
)
FAMILY.register()
