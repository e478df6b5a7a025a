"""OLMo 2 with slim attention: keys are cached before QK-norm, where they are linear in the inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.models.olmo2.modeling_olmo2 import (
    Olmo2Attention,
    Olmo2DecoderLayer,
    Olmo2ForCausalLM,
    Olmo2Model,
    Olmo2RotaryEmbedding,
)

from ..decoder import SlimCausalLM, SlimRotaryDecoder
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family
from ..slim_configs import SlimOlmo2Config


class SlimOlmo2Attention(SlimAttention, Olmo2Attention):
    """Attention of a layer that caches no values."""

    q_norm: nn.Module
    k_norm: nn.Module

    def query_norm(self, query: Tensor) -> Tensor:
        """RMS norm over all heads, ``[rows, tokens, heads * head_dim]``."""
        normed: Tensor = self.q_norm(query)
        return normed

    def key_norm(self, keys: Tensor) -> Tensor:
        """RMS norm over all heads, ``[rows, tokens, heads * head_dim]``."""
        normed: Tensor = self.k_norm(keys)
        return normed


class SlimOlmo2Model(SlimRotaryDecoder, Olmo2Model):
    """OLMo 2's decoder, with slim attention."""

    config_class = SlimOlmo2Config
    slim_attention = SlimOlmo2Attention


class SlimOlmo2ForCausalLM(SlimCausalLM, Olmo2ForCausalLM):
    """OLMo 2 for generation, with slim attention."""

    config_class = SlimOlmo2Config
    slim_decoder = SlimOlmo2Model


def rms_norm(config: Any, weight: Tensor, x: Tensor) -> Tensor:
    """QK-norm of a whole projection, ``[tokens, heads * head_dim]``."""
    return weight * x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()


FAMILY = Family(
    "Olmo2ForCausalLM",
    SlimOlmo2ForCausalLM,
    SlimOlmo2Config,
    Olmo2DecoderLayer,
    Olmo2RotaryEmbedding,
    norm=rms_norm,
)
FAMILY.register()
