"""OLMo with slim attention."""

from __future__ import annotations

from typing import Any

from transformers.models.olmo.modeling_olmo import (
    OlmoAttention,
    OlmoDecoderLayer,
    OlmoForCausalLM,
    OlmoModel,
    OlmoRotaryEmbedding,
)

from ..decoder import SlimCausalLM, SlimRotaryDecoder
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family
from ..slim_configs import SlimOlmoConfig


class SlimOlmoAttention(SlimAttention, OlmoAttention):
    """Attention of a layer that caches no values."""


class SlimOlmoModel(SlimRotaryDecoder, OlmoModel):
    """OLMo's decoder, with slim attention."""

    config_class = SlimOlmoConfig
    slim_attention = SlimOlmoAttention


class SlimOlmoForCausalLM(SlimCausalLM, OlmoForCausalLM):
    """OLMo for generation, with slim attention."""

    config_class = SlimOlmoConfig
    slim_decoder = SlimOlmoModel


def refusal(config: Any) -> str | None:
    """Refuse ``clip_qkv``: clipped keys do not determine the inputs."""
    if config.clip_qkv is None:
        return None
    return f"keys and values are clipped to {config.clip_qkv:g} (clip_qkv), so that values do not follow from keys"


FAMILY = Family(
    "OlmoForCausalLM",
    SlimOlmoForCausalLM,
    SlimOlmoConfig,
    OlmoDecoderLayer,
    OlmoRotaryEmbedding,
    refusal=refusal,
)
FAMILY.register()
