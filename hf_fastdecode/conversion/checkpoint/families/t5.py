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


def refusal(config: Any) -> str | None:
    """Refuse Chronos: its configs are those of T5, but its classes are in another package."""
    if getattr(config, "chronos_config", None) is None:
        return None
    return (
        "Chronos models have classes of another package (chronos-forecasting), and Chronos-Bolt's decoder makes one "
        "pass for each forecast, so that no step reads a cache; keep it as it is"
    )


FAMILY = EncoderDecoder(
    "T5ForConditionalGeneration",
    SlimT5ForConditionalGeneration,
    SlimT5Config,
    embedding="shared.weight",
    decoder="decoder.",
    scale=1.0,
    score_bias=score_bias,
    other_refusal=refusal,
)
