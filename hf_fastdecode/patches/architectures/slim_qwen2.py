"""Qwen2 with slim attention: queries, keys and values have biases."""

from __future__ import annotations

from transformers.models.qwen2 import modeling_qwen2 as qwen2

from ..decoder import slim_classes
from ..layers.family import Family
from ..slim_configs import SlimQwen2Config

SlimQwen2Attention, SlimQwen2Model, SlimQwen2ForCausalLM = slim_classes(SlimQwen2Config, qwen2)
# Layers with a window drop slots, and positions are counted for all layers at once.
FAMILY = Family.of(
    SlimQwen2ForCausalLM,
    refused={
        "sliding_attention": "layers with a sliding window beside others (use_sliding_window) have no slim form; "
        "convert models without"
    },
)
