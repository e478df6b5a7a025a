"""The architectures of transformers that need more than the attention interface, by folder of ``transformers.models``.

Each has a file in `architectures`, but for those whose class lacks a flag alone.
"""

from __future__ import annotations

from typing import Final

from ..attention.own_code import OwnCode, register
from .architectures.bart import BART_FAMILY
from .architectures.bert import BERT_FAMILY
from .architectures.beside_encoder import LED
from .architectures.bloom import BLOOM
from .architectures.diffllama import DIFFLLAMA
from .architectures.doge import DOGE
from .architectures.falcon import FALCON
from .architectures.gemma3n import GEMMA3N
from .architectures.gpt2_alike import GPT2_ALIKE
from .architectures.gpt_neo import GPT_NEO
from .architectures.jetmoe import JETMOE
from .architectures.kosmos import KOSMOS_FAMILY
from .architectures.latent_attention import latent_attention
from .architectures.llama4 import LLAMA4
from .architectures.m2m_100 import M2M_100_FAMILY
from .architectures.minimax import MINIMAX
from .architectures.mllama import MLLAMA
from .architectures.mpt import MPT
from .architectures.recurrent_gemma import RECURRENT_GEMMA
from .architectures.t5 import T5_FAMILY
from .architectures.xlstm import XLSTM

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

_LATENT: Final = {
    "axk1": "AXK1Attention",
    "bailing_hybrid": "BailingHybridAttention",
    "deepseek_v2": "DeepseekV2Attention",
    "deepseek_v3": "DeepseekV3Attention",
    "glm4_moe_lite": "Glm4MoeLiteAttention",
    "kimi_linear": "KimiLinearAttention",
    "longcat_flash": "LongcatFlashMLA",
    "minicpm3": "MiniCPM3Attention",
    "mistral4": "Mistral4Attention",
    "youtu": "YoutuAttention",
}
"""Attention classes whose cache holds latents."""

OWN_ATTENTION: Final[dict[str, OwnCode]] = {
    **dict.fromkeys(_FLAG_ALONE, OwnCode()),
    **_HANDS_GENERATE_ON,
    **dict.fromkeys(_HANDS_POSITIONS_ON, OwnCode(counts_padding=True)),
    **{name: latent_attention(attention) for name, attention in _LATENT.items()},
    **BART_FAMILY,
    **BERT_FAMILY,
    **GPT2_ALIKE,
    **KOSMOS_FAMILY,
    **M2M_100_FAMILY,
    "bloom": BLOOM,
    "diffllama": DIFFLLAMA,
    "doge": DOGE,
    "falcon": FALCON,
    "gemma3n": GEMMA3N,
    "gpt_neo": GPT_NEO,
    "jetmoe": JETMOE,
    "led": LED,
    "llama4": LLAMA4,
    "minimax": MINIMAX,
    "mllama": MLLAMA,
    "mpt": MPT,
    "recurrent_gemma": RECURRENT_GEMMA,
    **T5_FAMILY,
    "xlstm": XLSTM,
}


def register_own_attention() -> None:
    """Register all of them; once per process."""
    for name, code in OWN_ATTENTION.items():
        register(name, code)
