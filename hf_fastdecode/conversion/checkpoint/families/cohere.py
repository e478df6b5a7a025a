"""Cohere with multi-head attention (Command R, Aya 23 35B)."""

from typing import Any

from torch import Tensor
from transformers.models.cohere.modeling_cohere import CohereDecoderLayer, CohereRotaryEmbedding

from hf_fastdecode.patches.architectures.slim_cohere import SlimCohereForCausalLM
from hf_fastdecode.patches.slim_configs import SlimCohereConfig

from ..family import Family


def layer_norm(config: Any, weight: Tensor, x: Tensor) -> Tensor:
    """QK-norm of each head of a whole projection, ``[tokens, heads * head_dim]``; the weight is per head."""
    heads = x.unflatten(-1, tuple(weight.shape))
    centred = heads - heads.mean(-1, keepdim=True)
    normed = centred * (centred.square().mean(-1, keepdim=True) + config.layer_norm_eps).rsqrt()
    return (weight * normed).flatten(-2)


FAMILY = Family(
    "CohereForCausalLM",
    SlimCohereForCausalLM,
    SlimCohereConfig,
    CohereDecoderLayer,
    CohereRotaryEmbedding,
    layout="interleaved",
    norm=layer_norm,
)
