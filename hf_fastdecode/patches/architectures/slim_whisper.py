"""Whisper with slim attention in the decoder: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import AutoModel, AutoModelForSpeechSeq2Seq
from transformers.models.whisper.modeling_whisper import (
    WhisperAttention,
    WhisperForConditionalGeneration,
    WhisperModel,
    WhisperPreTrainedModel,
)

from ..attention.decoder_attention import SlimDecoderAttention
from ..decoder import SlimPreTrainedModel
from ..encoder_decoder import SlimEncoderDecoder
from ..encoder_decoder_configs import SlimWhisperConfig


class SlimWhisperAttention(SlimDecoderAttention, WhisperAttention):
    """Attention of a decoder layer that caches no values."""


class SlimWhisperPreTrainedModel(SlimPreTrainedModel, WhisperPreTrainedModel):
    """Base class of the models."""

    config_class = SlimWhisperConfig


class SlimWhisperModel(SlimEncoderDecoder, SlimWhisperPreTrainedModel, WhisperModel):
    """Whisper's encoder and decoder, with slim attention."""

    slim_attention = SlimWhisperAttention


class SlimWhisperForConditionalGeneration(
    SlimEncoderDecoder, SlimWhisperPreTrainedModel, WhisperForConditionalGeneration
):
    """Whisper for generation, with slim attention."""

    slim_attention = SlimWhisperAttention


AutoModel.register(SlimWhisperConfig, SlimWhisperModel, exist_ok=True)
AutoModelForSpeechSeq2Seq.register(SlimWhisperConfig, SlimWhisperForConditionalGeneration, exist_ok=True)
