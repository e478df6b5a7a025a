"""Whisper with slim attention in the decoder: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.auto.modeling_auto import AutoModelForSpeechSeq2Seq
from transformers.models.whisper.modeling_whisper import (
    WhisperAttention,
    WhisperForConditionalGeneration,
    WhisperModel,
    WhisperPreTrainedModel,
)

from ..decoder import SlimEncoderDecoder
from ..encoder_decoder_configs import SlimWhisperConfig
from ..layers.decoder_attention import SlimDecoderAttention
from ..layers.family import EncoderDecoder


class SlimWhisperAttention(SlimDecoderAttention, WhisperAttention):
    """Attention of a decoder layer that caches no values."""


class SlimWhisperPreTrainedModel(SlimEncoderDecoder, WhisperPreTrainedModel):
    """Base class of the models."""

    config_class = SlimWhisperConfig
    slim_attention = SlimWhisperAttention


class SlimWhisperModel(SlimWhisperPreTrainedModel, WhisperModel):
    """Whisper's encoder and decoder, with slim attention."""


class SlimWhisperForConditionalGeneration(SlimWhisperPreTrainedModel, WhisperForConditionalGeneration):
    """Whisper for generation, with slim attention."""

    def _prepare_decoder_input_ids_for_generation(
        self, batch_size: int, model_input_name: str, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """As transformers does for ``model_type == "whisper"``: nothing is put before given tokens."""
        for name in ("decoder_input_ids", "input_ids"):
            if model_kwargs.get(name) is not None:
                return model_kwargs.pop(name), model_kwargs
        found: tuple[Tensor, dict[str, Any]] = super()._prepare_decoder_input_ids_for_generation(
            batch_size, model_input_name, model_kwargs, *args, **kwargs
        )
        return found


FAMILY = EncoderDecoder(
    "WhisperForConditionalGeneration",
    SlimWhisperForConditionalGeneration,
    SlimWhisperConfig,
    SlimWhisperModel,
    embedding="model.decoder.embed_tokens.weight",
    decoder="model.decoder.",
    auto=AutoModelForSpeechSeq2Seq,
    audio=True,
)
FAMILY.register()
