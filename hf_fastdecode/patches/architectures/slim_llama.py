"""Llama with slim attention: layers that cache keys and V-coordinates instead of keys and values.

A separate model type, rather than a patch of Llama: a checkpoint without value projections must not load into
classes that would draw them at random. Any cache of transformers serves, as its keys and values.
"""

from __future__ import annotations

from transformers.models.llama import modeling_llama as llama

from ..decoder import slim_classes
from ..layers.family import Family
from ..slim_configs import SlimLlamaConfig

SlimLlamaAttention, SlimLlamaModel, SlimLlamaForCausalLM = slim_classes(SlimLlamaConfig, llama)
FAMILY = Family.of(SlimLlamaForCausalLM)
