"""OLMo."""

from typing import Any

from transformers.models.olmo.modeling_olmo import OlmoDecoderLayer, OlmoRotaryEmbedding

from hf_fastdecode.patches.architectures.slim_olmo import SlimOlmoForCausalLM
from hf_fastdecode.patches.slim_configs import SlimOlmoConfig

from ..family import Family


def refusal(config: Any) -> str | None:
    """Refuse ``clip_qkv``: clipped keys do not determine the inputs."""
    if config.clip_qkv is None:
        return None
    return f"keys and values are clipped to {config.clip_qkv:g} (clip_qkv), so that values do not follow from keys"


FAMILY = Family(
    "OlmoForCausalLM",
    SlimOlmoForCausalLM,
    SlimOlmoConfig,
    OlmoDecoderLayer,
    OlmoRotaryEmbedding,
    refusal=refusal,
)
