"""Model types of encoder-decoders that share context, and why others do not, as data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
