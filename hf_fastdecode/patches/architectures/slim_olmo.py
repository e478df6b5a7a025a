"""OLMo with slim attention."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.olmo.modeling_olmo import OlmoAttention, OlmoForCausalLM, OlmoModel

from ..attention.attention_layer import SlimAttention
from ..decoder import SlimCausalLM, SlimRotaryDecoder
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


AutoModel.register(SlimOlmoConfig, SlimOlmoModel, exist_ok=True)
AutoModelForCausalLM.register(SlimOlmoConfig, SlimOlmoForCausalLM, exist_ok=True)
