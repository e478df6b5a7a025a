"""Qwen2 with multi-head attention."""

from typing import Any

from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RotaryEmbedding

from hf_fastdecode.patches.architectures.slim_qwen2 import SlimQwen2ForCausalLM
from hf_fastdecode.patches.slim_configs import SlimQwen2Config

from ..family import Family


def refusal(config: Any) -> str | None:
    """Refuse a window in some layers: these drop slots that others keep, and positions are counted for all at once."""
    if "sliding_attention" not in config.layer_types:
        return None
    return "layers with a sliding window beside others (use_sliding_window) have no slim form; convert models without"


FAMILY = Family(
    "Qwen2ForCausalLM",
    SlimQwen2ForCausalLM,
    SlimQwen2Config,
    Qwen2DecoderLayer,
    Qwen2RotaryEmbedding,
    refusal=refusal,
)
