"""Cohere (Aya 23) with slim attention: RoPE of neighbouring coordinates, and QK-norm per head where there is one."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.cohere import modeling_cohere as cohere

from ..decoder import SlimCausalLM, slim_classes
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, layer_norm
from ..slim_configs import SlimCohereConfig


class _Attention(SlimAttention):
    interleaved = True

    def norm(self, module: Any, x: Tensor) -> Tensor:
        return module(x.unflatten(-1, (-1, self.head_dim))).flatten(-2)


class _Model(SlimCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.logit_scale = config.logit_scale
        self.tie_word_embeddings = config.tie_word_embeddings


SlimCohereAttention, SlimCohereModel, SlimCohereForCausalLM = slim_classes(
    SlimCohereConfig, cohere, attention=_Attention, model=_Model
)
FAMILY = Family.of(SlimCohereForCausalLM, norm=layer_norm)
