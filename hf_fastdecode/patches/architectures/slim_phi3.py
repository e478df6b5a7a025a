"""Phi-3 with slim attention: the fused projection of queries, keys and values becomes two, of queries and of keys."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.phi3.modeling_phi3 import Phi3Attention, Phi3ForCausalLM, Phi3Model, Phi3PreTrainedModel

from ..attention_layer import SlimAttention
from ..decoder import SlimCausalLM, SlimPreTrainedModel, SlimRotaryDecoder
from ..slim_configs import SlimPhi3Config


class SlimPhi3Attention(SlimAttention, Phi3Attention):
    """Attention of a layer that caches no values."""

    values_from = "qkv_proj"


class SlimPhi3PreTrainedModel(SlimPreTrainedModel, Phi3PreTrainedModel):
    """Base class of the models."""

    config_class = SlimPhi3Config


class SlimPhi3Model(SlimRotaryDecoder, SlimPhi3PreTrainedModel, Phi3Model):
    """Phi-3's decoder, which rotates keys when it reads them."""

    slim_attention = SlimPhi3Attention


class SlimPhi3ForCausalLM(SlimCausalLM, SlimPhi3PreTrainedModel, Phi3ForCausalLM):
    """Phi-3 for generation, with slim attention."""

    slim_decoder = SlimPhi3Model


AutoModel.register(SlimPhi3Config, SlimPhi3Model, exist_ok=True)
AutoModelForCausalLM.register(SlimPhi3Config, SlimPhi3ForCausalLM, exist_ok=True)
