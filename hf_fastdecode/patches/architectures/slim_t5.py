"""T5 with slim attention in the decoder: biases of relative positions, which are added to scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.models.t5 import modeling_t5 as t5

from ..._compat import takes_cache
from ...cache.layers.cross import CrossView
from ..config_base import SlimLayer
from ..decoder import SlimEncoderDecoder, encoder_decoder_classes
from ..encoder_decoder_configs import SlimT5Config
from ..layers.decoder_attention import SlimDecoderAttention
from ..layers.family import Family
from ..layers.slim_attention import causal_mask
from .encoder_decoders import biases_by_distance


class _Attention(SlimDecoderAttention):
    projections = ("q", "k", "v")
    output_projection = "o"
    compute_bias: Callable[..., Tensor]

    def __init__(self, layer: SlimLayer, cross: bool, **ordinary: Any) -> None:
        config = ordinary["config"]
        self.num_heads, self.head_dim = config.num_heads, config.d_kv
        super().__init__(layer, cross, **ordinary)

    @classmethod
    def in_place_of(cls, ordinary: Any, layer: SlimLayer, cross: bool) -> Self:
        names = ("config", "has_relative_attention_bias", "layer_idx", "is_causal")
        return cls(layer, cross, **{name: getattr(ordinary, name) for name in names})

    @takes_cache
    def forward(
        self,
        hidden_states: Tensor,
        mask: Tensor | None = None,
        key_value_states: Tensor | None = None,
        position_bias: Tensor | None = None,
        cache: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Attend, with the ordinary layer's arguments; cross-attention passes on the position bias it is given."""
        if isinstance(cache, CrossView):
            if not self.cross and position_bias is None and self.has_relative_attention_bias:
                position_bias = biases_by_distance(self)
            out, _ = self.attend(hidden_states, key_value_states, cache, mask, position_bias)
            return out, position_bias, None
        if not self.cross:
            queries, cached, tokens = hidden_states.shape[1], 0, hidden_states.shape[1]
            if cache is not None:
                cached = cache.get_seq_length(self.layer_idx)
                tokens, _ = cache.get_mask_sizes(queries, self.layer_idx)
            if position_bias is None:
                position_bias = self.compute_bias(queries, tokens, hidden_states.device, cached)
            mask = biased_mask(mask, position_bias)
        out, weights = self.attend(hidden_states, key_value_states, cache, mask)
        return out, position_bias, weights


def biased_mask(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A mask to be added to scores, ``[rows or 1, heads, queries, tokens]``, with the bias of positions in it.

    The mask given is ``[rows, 1, queries, tokens]`` of bool, or to be added to scores; None for causal attention.
    """
    if mask is None:
        mask = causal_mask(bias.shape[2], bias.shape[3], bias.device)
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, torch.finfo(bias.dtype).min)
    return bias + mask


class _Model(SlimEncoderDecoder):
    blocks = "block"
    self_attention = "layer.0.SelfAttention"
    cross_attention = "layer.1.EncDecAttention"

    def _init_weights(self, module: nn.Module) -> None:
        if not isinstance(module, SlimT5Attention):  # whose projections are initialised as linear layers
            super()._init_weights(module)


SlimT5Attention, SlimT5Model, SlimT5ForConditionalGeneration = encoder_decoder_classes(
    SlimT5Config, t5, attention=_Attention, model=_Model
)


def score_bias(model: Any, tokens: int) -> Tensor:
    """Bias of relative positions, ``[heads, tokens, tokens]``, which all layers of the decoder share."""
    return model.decoder.block[0].layer[0].SelfAttention.compute_bias(tokens, tokens)[0]


FAMILY = Family.of(
    SlimT5ForConditionalGeneration,
    embedding="shared.weight",
    layers="decoder.block.",
    scale=lambda config, index: 1.0,
    score_bias=score_bias,
    refused={  # whose configs are those of T5
        "chronos_config": "Chronos models have classes of another package (chronos-forecasting), and Chronos-Bolt's "
        "decoder makes one pass for each forecast, so that no step reads a cache; keep it as it is"
    },
)
