"""Gemma with slim attention: keys may have more coordinates than the inputs, as in Gemma 7B."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaAttention, GemmaForCausalLM, GemmaModel

from ..attention.attention_layer import SlimAttention
from ..decoder import SlimCausalLM, SlimRotaryDecoder
from ..slim_configs import SlimGemmaConfig


class SlimGemmaAttention(SlimAttention, GemmaAttention):
    """Attention of a layer that caches no values."""


class SlimGemmaModel(SlimRotaryDecoder, GemmaModel):
    """Gemma's decoder, with slim attention."""

    config_class = SlimGemmaConfig
    slim_attention = SlimGemmaAttention


class SlimGemmaForCausalLM(SlimCausalLM, GemmaForCausalLM):
    """Gemma for generation, with slim attention."""

    config_class = SlimGemmaConfig
    slim_decoder = SlimGemmaModel


AutoModel.register(SlimGemmaConfig, SlimGemmaModel, exist_ok=True)
AutoModelForCausalLM.register(SlimGemmaConfig, SlimGemmaForCausalLM, exist_ok=True)
