"""Cohere (Aya 23) with slim attention: RoPE of neighbouring coordinates, and QK-norm per head where there is one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import (
    CohereAttention,
    CohereDecoderLayer,
    CohereForCausalLM,
    CohereModel,
    CohereRotaryEmbedding,
)

from ..decoder import SlimCausalLM, SlimRotaryDecoder
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, layer_norm
from ..slim_configs import SlimCohereConfig


class SlimCohereAttention(SlimAttention, CohereAttention):
    """Attention of a layer that caches no values."""

    interleaved = True
    use_qk_norm: bool
    q_norm: nn.Module
    k_norm: nn.Module

    @property
    def normalizes_keys(self) -> bool:
        """Whether the config has QK-norm."""
        return self.use_qk_norm

    @property
    def normalizes_queries(self) -> bool:
        """Whether the config has QK-norm."""
        return self.use_qk_norm

    def query_norm(self, query: Tensor) -> Tensor:
        """Layer norm of each head of ``[rows, tokens, heads * head_dim]``."""
        return self.q_norm(query.unflatten(-1, (-1, self.head_dim))).flatten(-2) if self.use_qk_norm else query

    def key_norm(self, keys: Tensor) -> Tensor:
        """Layer norm of each head of ``[rows, tokens, heads * head_dim]``."""
        return self.k_norm(keys.unflatten(-1, (-1, self.head_dim))).flatten(-2) if self.use_qk_norm else keys


class SlimCohereModel(SlimRotaryDecoder, CohereModel):
    """Cohere's decoder, with slim attention."""

    config_class = SlimCohereConfig
    slim_attention = SlimCohereAttention


class SlimCohereForCausalLM(SlimCausalLM, CohereForCausalLM):
    """Cohere for generation, with slim attention."""

    config_class = SlimCohereConfig
    slim_decoder = SlimCohereModel

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.logit_scale = config.logit_scale
        self.tie_word_embeddings = config.tie_word_embeddings


FAMILY = Family(
    "CohereForCausalLM",
    SlimCohereForCausalLM,
    SlimCohereConfig,
    CohereDecoderLayer,
    CohereRotaryEmbedding,
    layout="interleaved",
    norm=layer_norm,
)
FAMILY.register()
