"""OLMo 2."""

from typing import Any

from torch import Tensor
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer, Olmo2RotaryEmbedding

from hf_fastdecode.patches.architectures.slim_olmo2 import SlimOlmo2ForCausalLM
from hf_fastdecode.patches.slim_configs import SlimOlmo2Config

from ..family import Family


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
