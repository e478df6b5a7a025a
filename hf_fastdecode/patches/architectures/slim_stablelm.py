"""StableLM with slim attention: partial RoPE, and a QK-norm of its own for each head where there is one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.stablelm import modeling_stablelm as stablelm

from ..decoder import SlimRotaryDecoder, slim_classes
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, layer_norm
from ..layers.rotation import ROTATION, Rotation
from ..layers.slim_values import wide
from ..slim_configs import SlimStableLmConfig


class _Attention(SlimAttention):
    """Layer norms of each head of queries and keys, ``[rows, tokens, heads * head_dim]`` in fp32, if any."""

    qk_layernorm: bool
    q_layernorm: Any
    k_layernorm: Any

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if self.qk_layernorm:
            for norm in (*self.q_layernorm.norms, *self.k_layernorm.norms):
                norm.__class__ = HeadNorm

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `SlimAttention.forward` does, with the rotation as `position_embeddings`."""
        return super().forward(hidden_states, **{ROTATION: position_embeddings}, **kwargs)

    @property
    def normalizes_keys(self) -> bool:
        return self.qk_layernorm

    @property
    def normalizes_queries(self) -> bool:
        return self.qk_layernorm

    def query_norm(self, query: Tensor) -> Tensor:
        return head_norms(self.q_layernorm.norms, query) if self.qk_layernorm else query

    def key_norm(self, keys: Tensor) -> Tensor:
        return head_norms(self.k_layernorm.norms, keys) if self.qk_layernorm else keys


def head_norms(norms: Sequence[nn.Module], x: Tensor) -> Tensor:
    """Layer norm of each head of ``[rows, tokens, heads * head_dim]`` by that head's norm, a module."""
    heads = x.to(wide(x.dtype)).chunk(len(norms), -1)
    return torch.cat([norm(head) for norm, head in zip(norms, heads, strict=True)], -1)


class HeadNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., head_dim]``."""
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), None, self.eps)


class SlimStableLmDecoderLayer(stablelm.StableLmDecoderLayer):
    """A layer with slim attention; the ordinary one hands its attention a fixed set of arguments."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        """Run the layer, with the rotation in the place of `position_embeddings`."""
        kwargs["position_embeddings"] = kwargs.pop(ROTATION, None)
        return super().forward(hidden_states, **kwargs)


class _Decoder(SlimRotaryDecoder):
    slim_layer = SlimStableLmDecoderLayer
    _no_split_modules = ("StableLmDecoderLayer", "SlimStableLmDecoderLayer")


def norm_weight(plain: Mapping[str, Tensor], part: str) -> Tensor | None:
    start = f"{part}_layernorm.norms."
    heads = sum(name.startswith(start) for name in plain)
    return torch.stack([plain[f"{start}{head}.weight"] for head in range(heads)]) if heads else None


SlimStableLmAttention, SlimStableLmModel, SlimStableLmForCausalLM = slim_classes(
    SlimStableLmConfig, stablelm, attention=_Attention, decoder=_Decoder
)
FAMILY = Family.of(
    SlimStableLmForCausalLM,
    stablelm.StableLmDecoderLayer,
    stablelm.StableLmRotaryEmbedding,
    norm=layer_norm,
    norm_weight=norm_weight,
)
