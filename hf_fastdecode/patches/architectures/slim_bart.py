"""BART with slim attention in the decoder: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import AutoModel, AutoModelForSeq2SeqLM
from transformers.models.bart.modeling_bart import (
    BartAttention,
    BartForConditionalGeneration,
    BartModel,
    BartPreTrainedModel,
)

from ..attention.decoder_attention import SlimDecoderAttention
from ..decoder import SlimPreTrainedModel
from ..encoder_decoder import SlimEncoderDecoder
from ..encoder_decoder_configs import SlimBartConfig
from ..layers.encoder_decoder import EncoderDecoder


class SlimBartAttention(SlimDecoderAttention, BartAttention):
    """Attention of a decoder layer that caches no values."""


class SlimBartPreTrainedModel(SlimPreTrainedModel, BartPreTrainedModel):
    """Base class of the models."""

    config_class = SlimBartConfig


class SlimBartModel(SlimEncoderDecoder, SlimBartPreTrainedModel, BartModel):
    """BART's encoder and decoder, with slim attention."""

    slim_attention = SlimBartAttention


class SlimBartForConditionalGeneration(SlimEncoderDecoder, SlimBartPreTrainedModel, BartForConditionalGeneration):
    """BART for generation, with slim attention."""

    slim_attention = SlimBartAttention


AutoModel.register(SlimBartConfig, SlimBartModel, exist_ok=True)
AutoModelForSeq2SeqLM.register(SlimBartConfig, SlimBartForConditionalGeneration, exist_ok=True)


FAMILY = EncoderDecoder(
    "BartForConditionalGeneration",
    SlimBartForConditionalGeneration,
    SlimBartConfig,
    embedding="model.shared.weight",
    decoder="model.decoder.",
    renamed={start: f"model.{start}" for start in ("shared.", "encoder.", "decoder.")},
)
