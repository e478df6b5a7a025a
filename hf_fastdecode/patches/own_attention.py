"""The architectures of transformers that need more than the attention interface, by folder of ``transformers.models``.

Each has a file in `architectures`, but for those whose class lacks a flag alone.
"""

from __future__ import annotations

from typing import Final

from ..attention.own_code import OwnCode, register
from .architectures.bloom import BLOOM
from .architectures.diffllama import DIFFLLAMA
from .architectures.doge import DOGE
from .architectures.falcon import FALCON
from .architectures.gemma3n import GEMMA3N
from .architectures.gpt_neo import GPT_NEO
from .architectures.gpt_neox_japanese import GPT_NEOX_JAPANESE
from .architectures.jetmoe import JETMOE
from .architectures.led import LED, SPEECHT5
from .architectures.llama4 import LLAMA4
from .architectures.mpt import MPT
from .architectures.rembert import MEGATRON_BERT, REMBERT
from .architectures.t5 import T5_FAMILY
from .architectures.xglm import XGLM

_FLAG_ALONE: Final = ("biogpt", "deepseek_vl", "deepseek_vl_hybrid", "qwen2_audio", "stablelm")
"""Their layers call the interface, although the class has no ``_supports_attention_backend``."""

OWN_ATTENTION: Final[dict[str, OwnCode]] = {
    **dict.fromkeys(_FLAG_ALONE, OwnCode()),
    "bloom": BLOOM,
    "diffllama": DIFFLLAMA,
    "doge": DOGE,
    "falcon": FALCON,
    "gemma3n": GEMMA3N,
    "gpt_neo": GPT_NEO,
    "gpt_neox_japanese": GPT_NEOX_JAPANESE,
    "jetmoe": JETMOE,
    "led": LED,
    "llama4": LLAMA4,
    "mpt": MPT,
    "megatron_bert": MEGATRON_BERT,
    "rembert": REMBERT,
    "speecht5": SPEECHT5,
    **T5_FAMILY,
    "xglm": XGLM,
}


def register_own_attention() -> None:
    """Register all of them; once per process."""
    for name, code in OWN_ATTENTION.items():
        register(name, code)
