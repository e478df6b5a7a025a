"""Qwen2 with slim attention: queries, keys and values have biases."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2Attention, Qwen2ForCausalLM, Qwen2Model

from ..attention.attention_layer import SlimAttention
from ..decoder import SlimCausalLM, SlimRotaryDecoder
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


AutoModel.register(SlimQwen2Config, SlimQwen2Model, exist_ok=True)
AutoModelForCausalLM.register(SlimQwen2Config, SlimQwen2ForCausalLM, exist_ok=True)
