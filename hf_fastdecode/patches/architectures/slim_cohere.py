"""Cohere (Aya 23) with slim attention: RoPE of neighbouring coordinates, and QK-norm per head where there is one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.cohere import modeling_cohere as cohere

from ..decoder import SlimCausalLM, slim_classes
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, layer_norm
from ..slim_configs import SlimCohereConfig


class _Attention(SlimAttention):
    """Layer norms of each head of queries and keys, ``[rows, tokens, heads * head_dim]``, if the config has some."""

    interleaved = True
    use_qk_norm: bool
    q_norm: nn.Module
    k_norm: nn.Module

    @property
    def normalizes_keys(self) -> bool:
        return self.use_qk_norm

    @property
    def normalizes_queries(self) -> bool:
        return self.use_qk_norm

    def query_norm(self, query: Tensor) -> Tensor:
        return self.q_norm(query.unflatten(-1, (-1, self.head_dim))).flatten(-2) if self.use_qk_norm else query

    def key_norm(self, keys: Tensor) -> Tensor:
        return self.k_norm(keys.unflatten(-1, (-1, self.head_dim))).flatten(-2) if self.use_qk_norm else keys


class _Model(SlimCausalLM):
    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.logit_scale = config.logit_scale
        self.tie_word_embeddings = config.tie_word_embeddings


SlimCohereAttention, SlimCohereModel, SlimCohereForCausalLM = slim_classes(
    SlimCohereConfig, cohere, attention=_Attention, model=_Model
)
FAMILY = Family.of(
    SlimCohereForCausalLM,
    cohere.CohereDecoderLayer,
    cohere.CohereRotaryEmbedding,
    interleaved=True,
    norm=layer_norm,
)
