"""Gemma with multi-head attention (Gemma-7B, CodeGemma-7B)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma.modeling_gemma import GemmaDecoderLayer, GemmaRotaryEmbedding

from hf_fastdecode.patches.architectures.slim_gemma import SlimGemmaForCausalLM
from hf_fastdecode.patches.slim_configs import SlimGemmaConfig

from ..family import Family


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
