"""OPT with slim attention: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForCausalLM
from transformers.models.opt.modeling_opt import OPTAttention, OPTDecoder, OPTForCausalLM, OPTModel, OPTPreTrainedModel

from ..attention.attention_layer import SlimAttention
from ..decoder import SlimCausalLM, SlimDecoder, SlimPreTrainedModel
from ..slim_configs import SlimOPTConfig


class SlimOPTAttention(SlimAttention, OPTAttention):
    """Attention of a layer that caches no values."""

    output_projection = "out_proj"
    dropout: float

    def dropout_share(self) -> float:
        """Share of the attention weights that training drops."""
        return self.dropout


class SlimOPTDecoder(SlimDecoder, OPTDecoder):
    """OPT's decoder."""

    config_class = SlimOPTConfig
    slim_attention = SlimOPTAttention


class SlimOPTModel(SlimPreTrainedModel, OPTModel):
    """OPT's decoder, as `SlimOPTForCausalLM` names it."""

    config_class = SlimOPTConfig

    def __init__(self, config: Any) -> None:
        OPTPreTrainedModel.__init__(self, config)  # not OPTModel's, which makes an ordinary decoder
        self.decoder = SlimOPTDecoder(config)
        self.post_init()


class SlimOPTForCausalLM(SlimCausalLM, OPTForCausalLM):
    """OPT for generation, with slim attention."""

    config_class = SlimOPTConfig
    slim_decoder = SlimOPTModel

    @staticmethod
    def make_head(config: Any) -> nn.Linear:
        """The projection to logits, of embeddings that may be narrower than the layers."""
        return nn.Linear(config.word_embed_proj_dim, config.vocab_size, bias=False)


AutoModel.register(SlimOPTConfig, SlimOPTModel, exist_ok=True)
AutoModelForCausalLM.register(SlimOPTConfig, SlimOPTForCausalLM, exist_ok=True)
