"""BART with slim attention in the decoder: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from transformers.models.bart import modeling_bart as bart

from ..decoder import encoder_decoder_classes
from ..encoder_decoder_configs import SlimBartConfig
from ..layers.family import EncoderDecoder

SlimBartAttention, SlimBartModel, SlimBartForConditionalGeneration = encoder_decoder_classes(SlimBartConfig, bart)
FAMILY = EncoderDecoder.of(
    SlimBartForConditionalGeneration,
    slim_base=SlimBartModel,
    embedding="model.shared.weight",
    decoder="model.decoder.",
    renamed={start: f"model.{start}" for start in ("shared.", "encoder.", "decoder.")},
)
