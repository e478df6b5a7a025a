"""Model types of encoder-decoders that share context, and why others do not, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from transformers import PreTrainedConfig

ENCODER_DECODERS: Final = frozenset(
    {
        *("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "led", "m2m_100", "marian", "mbart", "mvp"),
        *("nllb-moe", "pegasus", "pegasus_x", "plbart"),
        *("longt5", "mt5", "switch_transformers", "t5", "t5gemma", "umt5"),
        *("moonshine", "seamless_m4t", "seamless_m4t_v2", "speech_to_text", "speecht5", "whisper"),
        *("encoder-decoder", "florence2", "speech-encoder-decoder", "vision-encoder-decoder"),
        *("slim_bart", "slim_t5", "slim_whisper"),
    }
)
"""Model types whose decoders find the encoder's keys and values in transformers' `EncoderDecoderCache`, and hand them
to an attention function, or have stand-ins that do. Each was compared with stock."""

OTHER_ENCODER_DECODERS: Final[Mapping[str, str]] = {
    "fsmt": "its decoder takes tokens before rows, and hides padding by masks of its own",
    "prophetnet": "its decoder predicts several tokens in streams, each with attention of its own",
    "t5gemma2": "its decoder attends to its own tokens and to the encoder's in one softmax",
}
"""Why others run stock."""

LEAVES_TOKENS_OUT: Final = "its experts leave out tokens beyond a capacity that all rows of a pass have together"
"""Why a model runs stock for which `leaves_tokens_out` is true."""


def leaves_tokens_out(config: PreTrainedConfig) -> bool:
    """Whether what a row computes depends on the other rows of its pass, so that a row run once is not what stock has.

    NLLB-MoE's experts take so large a share of a pass's tokens, and by default all of them.
    """
    if config.model_type != "nllb-moe":
        return False
    share: float = config.moe_eval_capacity_token_fraction
    return share < 1  # from 0 down, the capacity is one of its own
