"""StableLM with slim attention: partial RoPE, and a QK-norm per head where there is one."""

from __future__ import annotations

from collections.abc import Mapping
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
    """Each head of queries and keys has a norm, computed in fp32."""

    norms = ("q_layernorm", "k_layernorm")

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        for name in self.norms:
            for norm in getattr(self._modules.get(name), "norms", ()):
                norm.__class__ = HeadNorm

    def forward(
        self, hidden_states: Tensor, position_embeddings: Rotation | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        return super().forward(hidden_states, **{ROTATION: position_embeddings}, **kwargs)

    def norm(self, module: Any, x: Tensor) -> Tensor:
        heads = x.to(wide(x.dtype)).chunk(len(module.norms), -1)
        return torch.cat([norm(head) for norm, head in zip(module.norms, heads, strict=True)], -1)


class HeadNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        """Normalize ``[..., head_dim]`` in its dtype."""
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), None, self.eps)


class SlimStableLmDecoderLayer(stablelm.StableLmDecoderLayer):
    """A layer with slim attention; the ordinary one hands its attention a fixed set of arguments."""

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
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
FAMILY = Family.of(SlimStableLmForCausalLM, norm=layer_norm, norm_weight=norm_weight)
