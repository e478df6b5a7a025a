"""GPT-2 with slim attention: learned positions, so that cached keys are scored as they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers.models.gpt2 import modeling_gpt2 as gpt2

from ..decoder import SlimDecoder, slim_classes
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, Fused
from ..slim_configs import SlimGPT2Config


class _Attention(SlimAttention):
    values_from = "c_attn"
    output_projection = "c_proj"
    attn_dropout: nn.Dropout
    resid_dropout: nn.Module

    def output(self, out: Tensor) -> Tensor:
        return self.resid_dropout(super().output(out))

    def dropout_share(self) -> float:
        return self.attn_dropout.p


class _Decoder(SlimDecoder):
    blocks = "h"
    attention = "attn"


def scale(config: Any, index: int) -> float:
    head_dim = config.hidden_size // config.num_attention_heads
    return (head_dim**-0.5 if config.scale_attn_weights else 1.0) / (
        index + 1 if config.scale_attn_by_inverse_layer_idx else 1
    )


def embed(config: Any, tensors: Mapping[str, Tensor], embedding: str, ids: Tensor) -> Tensor:
    return tensors[embedding][ids] + tensors["transformer.wpe.weight"][: len(ids)]


SlimGPT2Attention, SlimGPT2Model, SlimGPT2LMHeadModel = slim_classes(
    SlimGPT2Config, gpt2, attention=_Attention, decoder=_Decoder, head="LMHeadModel"
)
FAMILY = Family.of(
    SlimGPT2LMHeadModel,
    embedding="transformer.wte.weight",
    fused=Fused("c_attn", conv1d=True),
    output_conv1d=True,
    scale=scale,
    refused={"add_cross_attention": "layers with cross-attention ({name}) have no slim form; convert models without"},
    embed=embed,
    left_out=(".attn.bias", ".attn.masked_bias"),
    renamed={start: f"transformer.{start}" for start in ("wte.", "wpe.", "h.", "ln_f.")},
)
