"""Model types of encoder-decoders that share context, and why others do not, as data."""

from __future__ import annotations

from collections.abc import Mapping
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
    }
)
"""Model types whose decoders find the encoder's keys and values in transformers' `EncoderDecoderCache`, and hand them
to an attention function. Each was compared with stock."""

_SLIM: Final = "slim decoders with an encoder store their caches by themselves, once for each row"

ENCODER_DECODERS_OF_STOCK: Final[Mapping[str, str]] = {
    **dict.fromkeys(("slim_bart", "slim_t5", "slim_whisper"), _SLIM),
}
"""Of others, why they run stock."""
