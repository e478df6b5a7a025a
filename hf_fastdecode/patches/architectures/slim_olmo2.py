"""OLMo 2 with slim attention: keys are cached before QK-norm, where they are linear in the inputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.olmo2 import modeling_olmo2 as olmo2

from ..decoder import slim_classes
from ..layers.family import Family
from ..slim_configs import SlimOlmo2Config


def rms_norm(config: Any, weight: Tensor, x: Tensor) -> Tensor:
    """QK-norm of a whole projection, ``[tokens, heads * head_dim]``."""
    return weight * x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt()


SlimOlmo2Attention, SlimOlmo2Model, SlimOlmo2ForCausalLM = slim_classes(SlimOlmo2Config, olmo2)
FAMILY = Family.of(SlimOlmo2ForCausalLM, norm=rms_norm)
