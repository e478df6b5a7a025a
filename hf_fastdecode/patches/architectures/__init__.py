"""Slim architectures, a file each, and architectures of transformers that need more than the attention interface.

The latter are registered by folder of ``transformers.models``. Their methods are in files by kind; those that need a
flag alone are here.
"""

from __future__ import annotations

from typing import Final

from ...attention.overrides import OwnCode, register
from .biased_keys import BIASED_KEYS
from .decoders import DECODERS
from .encoder_decoders import ENCODER_DECODERS
from .latent_attention import LATENT_ATTENTION
from .states import STATES

_FLAG_ALONE: Final = ("biogpt", "deepseek_vl", "deepseek_vl_hybrid", "qwen2_audio", "stablelm")
"""Their layers call the interface, although the class has no ``_supports_attention_backend``."""

_HANDS_GENERATE_ON: Final = {
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), OwnCode(hands_generate_on=lambda arguments: True)),
    "janus": OwnCode(hands_generate_on=lambda arguments: arguments.get("generation_mode", "text") == "text"),
    "nemotron3_5_transcribe": OwnCode(
        hands_generate_on=lambda arguments: not arguments.get("return_word_timestamp_logits")
    ),
}
"""Their ``generate`` chooses an adapter, or whether to make text or images, or times of words."""

_HANDS_POSITIONS_ON: Final = ("evolla", "moss_transcribe_diarize")
"""Their ``forward`` names no ``position_ids``, but hands them on to a decoder, which counts padding if given none."""

OWN_ATTENTION: Final[dict[str, OwnCode]] = {
    **dict.fromkeys(_FLAG_ALONE, OwnCode()),
    **_HANDS_GENERATE_ON,
    **dict.fromkeys(_HANDS_POSITIONS_ON, OwnCode(counts_padding=True)),
    **BIASED_KEYS,
    **DECODERS,
    **ENCODER_DECODERS,
    **LATENT_ATTENTION,
    **STATES,
}


def register_own_attention() -> None:
    for name, code in OWN_ATTENTION.items():
        register(name, code)
