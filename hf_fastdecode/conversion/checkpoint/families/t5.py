"""T5, T5 v1.1 and Flan-T5."""

from typing import Any

from torch import Tensor

from hf_fastdecode.patches.architectures.slim_t5 import SlimT5ForConditionalGeneration
from hf_fastdecode.patches.encoder_decoder_configs import SlimT5Config

from ..encoder_decoder.architecture import EncoderDecoder


def score_bias(model: Any, tokens: int) -> Tensor:
    """Bias of relative positions, ``[heads, tokens, tokens]``, which all layers of the decoder share."""
    bias: Tensor = model.decoder.block[0].layer[0].SelfAttention.compute_bias(tokens, tokens)[0]
    return bias


FAMILY = EncoderDecoder(
    "T5ForConditionalGeneration",
    SlimT5ForConditionalGeneration,
    SlimT5Config,
    embedding="shared.weight",
    decoder="decoder.",
    scale=1.0,
    score_bias=score_bias,
)
