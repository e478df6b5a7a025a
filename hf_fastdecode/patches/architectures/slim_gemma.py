"""Gemma with slim attention: keys may have more coordinates than the inputs, as in Gemma 7B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import (
    GemmaAttention,
    GemmaDecoderLayer,
    GemmaForCausalLM,
    GemmaModel,
    GemmaRotaryEmbedding,
)

from ..decoder import SlimCausalLM, SlimRotaryDecoder
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family
from ..slim_configs import SlimGemmaConfig


class SlimGemmaAttention(SlimAttention, GemmaAttention):
    """Attention of a layer that caches no values."""


class SlimGemmaModel(SlimRotaryDecoder, GemmaModel):
    """Gemma's decoder, with slim attention."""

    config_class = SlimGemmaConfig
    slim_attention = SlimGemmaAttention


class SlimGemmaForCausalLM(SlimCausalLM, GemmaForCausalLM):
    """Gemma for generation, with slim attention."""

    config_class = SlimGemmaConfig
    slim_decoder = SlimGemmaModel


def refusal(config: Any) -> str | None:
    """Refuse bidirectional attention: such models cache nothing."""
    if not config.use_bidirectional_attention:
        return None
    return "bidirectional attention (use_bidirectional_attention) has no cache to make slim; keep the model as it is"


def embed_scale(config: Any) -> Tensor:
    """Factor on embeddings."""
    return torch.tensor(config.hidden_size**0.5)


def embed(config: Any, tensors: Mapping[str, Tensor], embedding: str, ids: Tensor) -> Tensor:
    """Scaled embeddings, ``[tokens, d]``; the factor is rounded to the model's dtype, as in the model."""
    found = tensors[embedding][ids]
    return found * embed_scale(config).to(found.dtype)


FAMILY = Family(
    "GemmaForCausalLM",
    SlimGemmaForCausalLM,
    SlimGemmaConfig,
    GemmaDecoderLayer,
    GemmaRotaryEmbedding,
    refusal=refusal,
    embed=embed,
    buffers={"embed_scale": embed_scale},
)
FAMILY.register()
