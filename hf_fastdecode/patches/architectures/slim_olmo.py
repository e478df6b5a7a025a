"""OLMo with slim attention."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.olmo.modeling_olmo import OlmoAttention, OlmoForCausalLM, OlmoModel, OlmoPreTrainedModel

from ..attention_layer import SlimAttention
from ..decoder import SlimCausalLM, SlimPreTrainedModel, SlimRotaryDecoder
from ..slim_configs import SlimOlmoConfig


class SlimOlmoAttention(SlimAttention, OlmoAttention):
    """Attention of a layer that caches no values."""


class SlimOlmoPreTrainedModel(SlimPreTrainedModel, OlmoPreTrainedModel):
    """Base class of the models."""

    config_class = SlimOlmoConfig


class SlimOlmoModel(SlimRotaryDecoder, SlimOlmoPreTrainedModel, OlmoModel):
    """OLMo's decoder, which rotates keys when it reads them."""

    slim_attention = SlimOlmoAttention


class SlimOlmoForCausalLM(SlimCausalLM, SlimOlmoPreTrainedModel, OlmoForCausalLM):
    """OLMo for generation, with slim attention."""

    slim_decoder = SlimOlmoModel


AutoModel.register(SlimOlmoConfig, SlimOlmoModel, exist_ok=True)
AutoModelForCausalLM.register(SlimOlmoConfig, SlimOlmoForCausalLM, exist_ok=True)
