"""BART with slim attention in the decoder: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from transformers.models.bart import modeling_bart as bart

from ..decoder import encoder_decoder_classes
from ..encoder_decoder_configs import SlimBartConfig
from ..layers.family import Family

SlimBartAttention, SlimBartModel, SlimBartForConditionalGeneration = encoder_decoder_classes(SlimBartConfig, bart)
FAMILY = Family.of(
    SlimBartForConditionalGeneration,
    embedding="model.shared.weight",
    layers="model.decoder.layers.",
    renamed={start: f"model.{start}" for start in ("shared.", "encoder.", "decoder.")},
)
