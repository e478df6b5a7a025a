"""Qwen2 with slim attention: queries, keys and values have biases."""

from __future__ import annotations

from typing import Any

from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2Model,
    Qwen2RotaryEmbedding,
)

from ..decoder import SlimCausalLM, SlimRotaryDecoder
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family
from ..slim_configs import SlimQwen2Config


class SlimQwen2Attention(SlimAttention, Qwen2Attention):
    """Attention of a layer that caches no values."""


class SlimQwen2Model(SlimRotaryDecoder, Qwen2Model):
    """Qwen2's decoder, with slim attention."""

    config_class = SlimQwen2Config
    slim_attention = SlimQwen2Attention


class SlimQwen2ForCausalLM(SlimCausalLM, Qwen2ForCausalLM):
    """Qwen2 for generation, with slim attention."""

    config_class = SlimQwen2Config
    slim_decoder = SlimQwen2Model


def refusal(config: Any) -> str | None:
    """Refuse windows in some layers only: these drop slots, and positions are counted for all layers at once."""
    if "sliding_attention" not in config.layer_types:
        return None
    return "layers with a sliding window beside others (use_sliding_window) have no slim form; convert models without"


FAMILY = Family(
    "Qwen2ForCausalLM",
    SlimQwen2ForCausalLM,
    SlimQwen2Config,
    Qwen2DecoderLayer,
    Qwen2RotaryEmbedding,
    refusal=refusal,
)
FAMILY.register()
