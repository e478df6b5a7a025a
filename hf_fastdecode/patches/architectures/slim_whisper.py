"""Whisper with slim attention in the decoder: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.auto.modeling_auto import AutoModelForSpeechSeq2Seq
from transformers.models.whisper import modeling_whisper as whisper

from ..decoder import SlimEncoderDecoder, encoder_decoder_classes
from ..encoder_decoder_configs import SlimWhisperConfig
from ..layers.family import Family


class _Model(SlimEncoderDecoder):
    def _prepare_decoder_input_ids_for_generation(
        self, batch_size: int, model_input_name: str, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> tuple[Tensor, dict[str, Any]]:
        """Put nothing before given tokens, as transformers does for ``model_type == "whisper"``."""
        for name in ("decoder_input_ids", "input_ids"):
            if model_kwargs.get(name) is not None:
                return model_kwargs.pop(name), model_kwargs
        return super()._prepare_decoder_input_ids_for_generation(
            batch_size, model_input_name, model_kwargs, *args, **kwargs
        )


SlimWhisperAttention, SlimWhisperModel, SlimWhisperForConditionalGeneration = encoder_decoder_classes(
    SlimWhisperConfig, whisper, model=_Model
)
FAMILY = Family.of(
    SlimWhisperForConditionalGeneration,
    embedding="model.decoder.embed_tokens.weight",
    layers="model.decoder.layers.",
    auto=AutoModelForSpeechSeq2Seq,
    audio=True,
)
