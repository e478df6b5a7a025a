"""Model types with layers that have states, as data."""

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
    "minicpmv4_7": True,
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
