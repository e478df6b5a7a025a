"""Llama with slim attention: layers that cache keys and V-coordinates, in the place of keys and values.

A model type of its own, rather than a patch of Llama: a checkpoint without value projections must not load into
classes that would draw them at random. Any cache of transformers serves, as its keys and values.
"""

from __future__ import annotations

from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaModel,
    LlamaRotaryEmbedding,
)

from ..decoder import SlimCausalLM, SlimRotaryDecoder
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family
from ..slim_configs import SlimLlamaConfig


class SlimLlamaAttention(SlimAttention, LlamaAttention):
    """Attention of a layer that caches no values."""


class SlimLlamaModel(SlimRotaryDecoder, LlamaModel):
    """Llama's decoder, with slim attention."""

    config_class = SlimLlamaConfig
    slim_attention = SlimLlamaAttention


class SlimLlamaForCausalLM(SlimCausalLM, LlamaForCausalLM):
    """Llama for generation, with slim attention."""

    config_class = SlimLlamaConfig
    slim_decoder = SlimLlamaModel


FAMILY = Family("LlamaForCausalLM", SlimLlamaForCausalLM, SlimLlamaConfig, LlamaDecoderLayer, LlamaRotaryEmbedding)
FAMILY.register()
