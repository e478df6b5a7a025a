"""Gemma with slim attention: keys may have more coordinates than the inputs, as in Gemma 7B."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.models.gemma import modeling_gemma as gemma

from ..decoder import slim_classes
from ..layers.family import Family
from ..slim_configs import SlimGemmaConfig


def embed_scale(config: Any) -> Tensor:
    return torch.tensor(config.hidden_size**0.5)


def embed(config: Any, tensors: Mapping[str, Tensor], embedding: str, ids: Tensor) -> Tensor:
    """Scaled embeddings, ``[tokens, d]``; the factor is rounded to the model's dtype, as in the model."""
    found = tensors[embedding][ids]
    return found * embed_scale(config).to(found.dtype)


SlimGemmaAttention, SlimGemmaModel, SlimGemmaForCausalLM = slim_classes(SlimGemmaConfig, gemma)
FAMILY = Family.of(
    SlimGemmaForCausalLM,
    embed=embed,
    buffers={"embed_scale": embed_scale},
    refused={
        "use_bidirectional_attention": "bidirectional attention ({name}) has no cache to make slim; keep the "
        "model as it is"
    },
)
