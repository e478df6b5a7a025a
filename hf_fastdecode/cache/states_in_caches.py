"""Model types with layers that have states, as data; those with states of their own are in `attention.own_code`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

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
