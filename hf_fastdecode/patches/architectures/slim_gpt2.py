"""GPT-2 with slim attention: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2Attention, GPT2LMHeadModel, GPT2Model

from ..attention.attention_layer import SlimAttention
from ..decoder import SlimCausalLM, SlimDecoder
from ..slim_configs import SlimGPT2Config


class SlimGPT2Attention(SlimAttention, GPT2Attention):
    """Attention of a layer that caches no values."""

    values_from = "c_attn"
    output_projection = "c_proj"
    attn_dropout: nn.Dropout
    resid_dropout: nn.Module

    def output(self, out: Tensor) -> Tensor:
        """Output projection and dropout."""
        dropped: Tensor = self.resid_dropout(super().output(out))
        return dropped

    def dropout_share(self) -> float:
        """Share of the attention weights that training drops."""
        return self.attn_dropout.p


class SlimGPT2Model(SlimDecoder, GPT2Model):
    """GPT-2's decoder."""

    config_class = SlimGPT2Config
    slim_attention = SlimGPT2Attention
    blocks = "h"
    attention = "attn"


class SlimGPT2LMHeadModel(SlimCausalLM, GPT2LMHeadModel):
    """GPT-2 for generation, with slim attention."""

    config_class = SlimGPT2Config
    slim_decoder = SlimGPT2Model


AutoModel.register(SlimGPT2Config, SlimGPT2Model, exist_ok=True)
AutoModelForCausalLM.register(SlimGPT2Config, SlimGPT2LMHeadModel, exist_ok=True)
