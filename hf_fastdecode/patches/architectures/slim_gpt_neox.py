"""GPT-NeoX (Pythia) with slim attention: partial RoPE; queries, keys and values are fused, head by head."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gpt_neox import modeling_gpt_neox as gpt_neox

from ..._compat import CACHE
from ..decoder import SlimRotaryDecoder, slim_classes
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, Fused
from ..slim_configs import SlimGPTNeoXConfig


class _Attention(SlimAttention):
    values_from = "query_key_value"
    output_projection = "dense"
    head_size: int

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        return self.head_size

    def forward(self, hidden_states: Tensor, *, layer_past: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        return super().forward(hidden_states, **{CACHE: layer_past}, **kwargs)


class _Decoder(SlimRotaryDecoder):
    attention = "attention"


SlimGPTNeoXAttention, SlimGPTNeoXModel, SlimGPTNeoXForCausalLM = slim_classes(
    SlimGPTNeoXConfig, gpt_neox, attention=_Attention, decoder=_Decoder
)
FAMILY = Family.of(
    SlimGPTNeoXForCausalLM,
    embedding="gpt_neox.embed_in.weight",
    fused=Fused("query_key_value", blocks=lambda config: config.num_attention_heads),
    left_out=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    renamed={"embed_out.": "lm_head."},
)
