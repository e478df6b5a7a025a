"""Model types of encoder-decoders that share context, as data."""

from __future__ import annotations

from typing import Final

ENCODER_DECODERS: Final = frozenset(
    {
        "bart",
        "bigbird_pegasus",
        "blenderbot",
        "blenderbot-small",
        "m2m_100",
        "marian",
        "mbart",
        "nllb-moe",
        "pegasus",
        "pegasus_x",
        "plbart",
        "longt5",
        "mt5",
        "switch_transformers",
        "t5",
        "umt5",
        "whisper",
    }
)
"""Model types whose decoders find the encoder's keys and values in transformers' `EncoderDecoderCache`, and hand them
to an attention function. Each was compared with stock."""
