"""Whisper."""

from transformers import AutoModelForSpeechSeq2Seq

from hf_fastdecode.patches.architectures.slim_whisper import SlimWhisperForConditionalGeneration
from hf_fastdecode.patches.encoder_decoder_configs import SlimWhisperConfig

from ..encoder_decoder.architecture import EncoderDecoder

FAMILY = EncoderDecoder(
    "WhisperForConditionalGeneration",
    SlimWhisperForConditionalGeneration,
    SlimWhisperConfig,
    embedding="model.decoder.embed_tokens.weight",
    decoder="model.decoder.",
    auto=AutoModelForSpeechSeq2Seq,
    audio=True,
)
