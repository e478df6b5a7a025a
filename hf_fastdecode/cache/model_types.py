"""Model types of encoder-decoders and of layers with states, and why others run stock, as data.

Models that keep their states elsewhere than in transformers' caches are in `attention.own_code`.
"""

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


STATES_IN_CACHES: Final[Mapping[str, bool]] = {
    "bailing_hybrid": True,
    "bamba": True,
    "falcon_h1": True,
    "falcon_mamba": False,
    "granitemoehybrid": True,
    "jamba": False,
    "kimi_linear": True,
    "lara_mini": True,
    "lfm2": True,
    "lfm2_moe": True,
    "lfm2_vl": True,
    "lfm3": True,
    "lfm3_vl": True,
    "mamba": False,
    "mamba2": True,
    "minicpm_ocr": True,
    "minicpmv4_6": True,
    "minicpmv4_7": True,
    "nemo_speechlm": True,
    "nemotron_h": True,
    "nemotron_h_omni": True,
    "olmo_hybrid": True,
    "qwen3_5": True,
    "qwen3_5_moe": True,
    "qwen3_5_moe_text": True,
    "qwen3_5_text": True,
    "qwen3_next": True,
    "zamba": False,
    "zamba2": True,
    "zaya": True,
}
"""Model types that store all states in transformers' cache, and whose attention layers, if any, call its interface.

Each was compared with stock. The value says whether a pass of several tokens continues from a stored state, which
Mamba-1 scans ignore.
"""

_INKLING: Final = ("inkling_mm_model", "inkling_text")
_INKLING_2: Final = ("inkling2", "inkling2_text", "inkling2_loop", "inkling2_loop_text")

STATES_NOT_SHARED: Final[Mapping[str, str]] = {
    "blt": "it groups the bytes of whole rows into patches by another model, in every pass",
    "git": "its steps count the tokens of an image before each prompt, also of text alone (GitModel.forward)",
    **dict.fromkeys((*_INKLING, *_INKLING_2), "each of its queries adds a bias of its own to each distance's scores"),
    "rwkv": "transformers mixes the rows of a batch in its steps, so that a row's tokens depend on the others "
    "(RwkvSelfAttention.extract_key_value)",
    **dict.fromkeys(
        ("voxtral_realtime", "voxtral_realtime_text"), "each of its steps adds another part of the sound to its token"
    ),
}
"""Model types that run stock for another reason than where they keep states."""
