"""OPT with slim attention: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.opt.modeling_opt import (
    OPTAttention,
    OPTDecoder,
    OPTForCausalLM,
    OPTModel,
    OPTPreTrainedModel,
)

from ..attention_layer import SlimAttention
from ..decoder import SlimCausalLM, SlimDecoder, SlimPreTrainedModel
from ..slim_configs import SlimOPTConfig


class SlimOPTAttention(SlimAttention, OPTAttention):
    """Attention of a layer that caches no values."""

    rotary = False
    dropout: float
    out_proj: nn.Module

    def output(self, out: Tensor) -> Tensor:
        """Output projection."""
        projected: Tensor = self.out_proj(out)
        return projected

    def dropout_share(self) -> float:
        """Share of the attention weights that training drops."""
        return self.dropout


class SlimOPTPreTrainedModel(SlimPreTrainedModel, OPTPreTrainedModel):
    """Base class of the models."""

    config_class = SlimOPTConfig


class SlimOPTDecoder(SlimDecoder, SlimOPTPreTrainedModel, OPTDecoder):
    """OPT's decoder."""

    slim_attention = SlimOPTAttention


class SlimOPTModel(SlimOPTPreTrainedModel, OPTModel):
    """OPT's decoder, as `SlimOPTForCausalLM` names it."""

    def __init__(self, config: Any) -> None:
        OPTPreTrainedModel.__init__(self, config)  # not OPTModel's, which makes an ordinary decoder
        self.decoder = SlimOPTDecoder(config)
        self.post_init()


class SlimOPTForCausalLM(SlimCausalLM, SlimOPTPreTrainedModel, OPTForCausalLM):
    """OPT for generation, with slim attention."""

    slim_decoder = SlimOPTModel

    @staticmethod
    def make_head(config: Any) -> nn.Linear:
        """The projection to logits, of embeddings that may be narrower than the layers."""
        return nn.Linear(config.word_embed_proj_dim, config.vocab_size, bias=False)


AutoModel.register(SlimOPTConfig, SlimOPTModel, exist_ok=True)
AutoModelForCausalLM.register(SlimOPTConfig, SlimOPTForCausalLM, exist_ok=True)
