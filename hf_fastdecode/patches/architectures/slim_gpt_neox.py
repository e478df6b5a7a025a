"""GPT-NeoX (Pythia) with slim attention: partial RoPE; queries, keys and values are fused, head by head."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.gpt_neox.modeling_gpt_neox import (
    GPTNeoXAttention,
    GPTNeoXForCausalLM,
    GPTNeoXLayer,
    GPTNeoXModel,
    GPTNeoXRotaryEmbedding,
)

from ..._compat import CACHE
from ..decoder import SlimCausalLM, SlimRotaryDecoder
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, Fused
from ..slim_configs import SlimGPTNeoXConfig


class SlimGPTNeoXAttention(SlimAttention, GPTNeoXAttention):
    """Attention of a layer that caches no values."""

    values_from = "query_key_value"
    output_projection = "dense"
    head_size: int

    @property
    def head_dim(self) -> int:  # type: ignore[override]
        """Width of a head."""
        return self.head_size

    def forward(self, hidden_states: Tensor, *, layer_past: Any = None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attend as `SlimAttention.forward` does, with the cache as `layer_past`."""
        return super().forward(hidden_states, **{CACHE: layer_past}, **kwargs)


class SlimGPTNeoXModel(SlimRotaryDecoder, GPTNeoXModel):
    """GPT-NeoX's decoder, with slim attention."""

    config_class = SlimGPTNeoXConfig
    slim_attention = SlimGPTNeoXAttention
    attention = "attention"


class SlimGPTNeoXForCausalLM(SlimCausalLM, GPTNeoXForCausalLM):
    """GPT-NeoX for generation, with slim attention."""

    config_class = SlimGPTNeoXConfig
    slim_decoder = SlimGPTNeoXModel


FAMILY = Family(
    "GPTNeoXForCausalLM",
    SlimGPTNeoXForCausalLM,
    SlimGPTNeoXConfig,
    GPTNeoXLayer,
    GPTNeoXRotaryEmbedding,
    embedding="gpt_neox.embed_in.weight",
    layers="gpt_neox.layers.",
    attention="attention.",
    fused=Fused("query_key_value", blocks=lambda config: config.num_attention_heads),
    output="dense",
    left_out=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    renamed={"embed_out.": "lm_head."},
)
FAMILY.register()
