"""BART."""

from hf_fastdecode.patches.architectures.slim_bart import SlimBartForConditionalGeneration
from hf_fastdecode.patches.encoder_decoder_configs import SlimBartConfig

from ..encoder_decoder.architecture import EncoderDecoder

FAMILY = EncoderDecoder(
    "BartForConditionalGeneration",
    SlimBartForConditionalGeneration,
    SlimBartConfig,
    embedding="model.shared.weight",
    decoder="model.decoder.",
    renamed={start: f"model.{start}" for start in ("shared.", "encoder.", "decoder.")},
)
