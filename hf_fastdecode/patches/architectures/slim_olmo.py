"""OLMo with slim attention."""

from __future__ import annotations

from typing import Any

from transformers.models.olmo import modeling_olmo as olmo

from ..decoder import slim_classes
from ..layers.family import Family
from ..slim_configs import SlimOlmoConfig


def refusal(config: Any) -> str | None:
    """Refuse ``clip_qkv``: clipped keys do not determine the inputs."""
    if config.clip_qkv is None:
        return None
    return f"keys and values are clipped to {config.clip_qkv:g} (clip_qkv), so that values do not follow from keys"


SlimOlmoAttention, SlimOlmoModel, SlimOlmoForCausalLM = slim_classes(SlimOlmoConfig, olmo)
FAMILY = Family.of(SlimOlmoForCausalLM, refusal=refusal)
