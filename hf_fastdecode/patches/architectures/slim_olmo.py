"""OLMo with slim attention."""

from __future__ import annotations

from transformers.models.olmo import modeling_olmo as olmo

from ..decoder import slim_classes
from ..layers.family import Family
from ..slim_configs import SlimOlmoConfig

SlimOlmoAttention, SlimOlmoModel, SlimOlmoForCausalLM = slim_classes(SlimOlmoConfig, olmo)
FAMILY = Family.of(
    SlimOlmoForCausalLM,
    refused={"clip_qkv": "keys and values are clipped to {value:g} ({name}), so that values do not follow from keys"},
)
