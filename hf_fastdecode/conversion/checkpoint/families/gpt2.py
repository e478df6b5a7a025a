"""GPT-2."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from hf_fastdecode.patches.architectures.slim_gpt2 import SlimGPT2LMHeadModel
from hf_fastdecode.patches.slim_configs import SlimGPT2Config

from ..family import Family, Fused


def refusal(config: Any) -> str | None:
    """Refuse cross-attention: its keys and values are those of an encoder, and slim decoders have none."""
    if not config.add_cross_attention:
        return None
    return "layers with cross-attention (add_cross_attention) have no slim form; convert models without"


def scale(config: Any, index: int) -> float:
    """Factor on the scores of a layer."""
    head_dim = config.hidden_size // config.num_attention_heads
    return (head_dim**-0.5 if config.scale_attn_weights else 1.0) / (
        index + 1 if config.scale_attn_by_inverse_layer_idx else 1
    )


def embed(config: Any, tensors: Mapping[str, Tensor], embedding: str, ids: Tensor) -> Tensor:
    """Embeddings of tokens and positions, ``[tokens, d]``."""
    return tensors[embedding][ids] + tensors["transformer.wpe.weight"][: len(ids)]


FAMILY = Family(
    "GPT2LMHeadModel",
    SlimGPT2LMHeadModel,
    SlimGPT2Config,
    GPT2Block,
    None,
    embedding="transformer.wte.weight",
    layers="transformer.h.",
    attention="attn.",
    fused=Fused("c_attn", conv1d=True),
    output="c_proj",
    output_conv1d=True,
    scale=scale,
    refusal=refusal,
    embed=embed,
    left_out=(".attn.bias", ".attn.masked_bias"),
    renamed={start: f"transformer.{start}" for start in ("wte.", "wpe.", "h.", "ln_f.")},
)
