"""OPT with slim attention: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from transformers.models.opt import modeling_opt as opt

from ..decoder import SlimCausalLM, SlimDecoder, SlimPreTrainedModel, slim_class
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family
from ..slim_configs import SlimOPTConfig


class SlimOPTAttention(SlimAttention, opt.OPTAttention):
    output_projection = "out_proj"
    dropout: float

    def dropout_share(self) -> float:
        return self.dropout


SlimOPTDecoder = slim_class(SlimOPTConfig, SlimDecoder, opt.OPTDecoder, slim_attention=SlimOPTAttention)


class SlimOPTModel(SlimPreTrainedModel, opt.OPTModel):
    config_class = SlimOPTConfig
    slim_attention = SlimOPTAttention
    blocks, attention = "decoder.layers", "self_attn"

    def __init__(self, config: Any) -> None:
        opt.OPTPreTrainedModel.__init__(self, config)  # not OPTModel's, which makes an ordinary decoder
        self.decoder = SlimOPTDecoder(config)
        self.post_init()


class SlimOPTForCausalLM(SlimCausalLM, opt.OPTForCausalLM):
    config_class = SlimOPTConfig
    slim_base = SlimOPTModel


def embed(config: Any, tensors: Mapping[str, Tensor], embedding: str, ids: Tensor) -> Tensor:
    """Embeddings of tokens, projected where they are narrower than the layers, and of positions, from row 2 on."""
    found = tensors[embedding][ids]
    if (project := tensors.get("model.decoder.project_in.weight")) is not None:
        found = F.linear(found, project)
    return found + tensors["model.decoder.embed_positions.weight"][2 : 2 + len(ids)]


FAMILY = Family.of(
    SlimOPTForCausalLM,
    embedding="model.decoder.embed_tokens.weight",
    embed=embed,
    renamed={"decoder.": "model.decoder."},
)
