"""CodeGen with slim attention: partial RoPE of neighbouring coordinates, and a fused projection in four parts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.codegen import modeling_codegen as codegen

from ..._compat import CACHE, CODEGEN_MAKES_TABLES_ONCE
from ...cache.shared import SharedContextCache
from ...conversion.fit.attention import Tables
from ..config_base import SlimLayer
from ..decoder import SlimCausalLM, SlimRotaryDecoder, slim_classes
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, Fused
from ..layers.rotation import ROTATION, Rotation, forest_rotation, key_positions, visible_slots
from ..slim_configs import SlimCodeGenConfig


class _Attention(SlimAttention):
    """Before transformers 5.24, CodeGen's blocks do not pass on `ROTATION`, so each layer makes one."""

    values_from = "qkv_proj"
    output_projection = "out_proj"
    interleaved = True
    resid_dropout: nn.Module

    def __init__(self, config: Any, layer_idx: int, layer: SlimLayer) -> None:
        super().__init__(config, layer_idx, layer)
        self.scaling, self.attention_dropout = self.head_dim**-0.5, config.attn_pdrop

    def forward(
        self,
        hidden_states: Tensor,
        *,
        position_ids: Tensor,
        layer_past: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend as `SlimAttention.forward` does; a cache that comes as `layer_past` comes without `ROTATION`."""
        if ROTATION in kwargs:
            return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)
        kwargs[CACHE] = layer_past
        if isinstance(layer_past, SharedContextCache):
            kwargs[ROTATION] = forest_rotation(self.tables, layer_past, position_ids, unrotates=self.config.unrotates)
            return super().forward(hidden_states, **kwargs)
        cached, slots = 0, hidden_states.shape[1]
        if layer_past is not None:
            cached = layer_past.get_seq_length(self.layer_idx)
            slots, _ = layer_past.get_mask_sizes(slots, self.layer_idx)
        keys = None
        if not self.config.unrotates:
            keys = self.tables(key_positions(position_ids, visible_slots(attention_mask), cached, slots))
        kwargs[ROTATION] = Rotation(position_ids, self.tables(position_ids), keys)
        return super().forward(hidden_states, attention_mask=attention_mask, **kwargs)

    def output(self, out: Tensor) -> Tensor:
        return self.resid_dropout(super().output(out))

    def weights_wanted(self, kwargs: dict[str, Any]) -> bool:
        return bool(kwargs.get("output_attentions", super().weights_wanted(kwargs)))


class _Decoder(SlimRotaryDecoder):
    blocks = "h"
    attention = "attn"
    hands_rotation_on = CODEGEN_MAKES_TABLES_ONCE

    def tables(self, positions: Tensor) -> Tables:
        """cos and sin, ``[rows or 1, tokens, rotated]`` in fp32, of positions ``[rows or 1, tokens]``."""
        owner: Any = self.rotary_emb if CODEGEN_MAKES_TABLES_ONCE else self.h[0].attn
        table = owner.embed_positions.to(positions.device).float()
        inside = positions.clamp(0, len(table) - 1)  # padding and unused slots may have any number
        sin, cos = table[inside].repeat_interleave(2, -1).chunk(2, -1)
        return cos, sin


class _Model(SlimCausalLM):
    head_bias = True


def positions_table(config: Any) -> Tensor:
    """sin, then cos, of every position: ``[positions, rotated]``."""
    return codegen.create_sinusoidal_positions(config.max_position_embeddings, config.rotary_dim)


def rotary(config: Any) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """cos and sin of positions, with an entry per rotated coordinate, as other architectures' tables have it."""

    def tables(like: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        sin, cos = positions_table(config)[positions].repeat_interleave(2, -1).chunk(2, -1)
        return cos, sin

    return tables


def run_layer(layer: nn.Module, hidden: Tensor, positions: Tensor, tables: Any) -> Tensor:
    """Run a layer as `family.run_layer`, with a mask: CodeGen's attention is causal by its mask alone."""
    tokens = hidden.shape[1]
    mask = torch.full((1, 1, tokens, tokens), torch.finfo(hidden.dtype).min).triu(1)
    if not CODEGEN_MAKES_TABLES_ONCE:
        return layer(hidden, position_ids=positions, attention_mask=mask)[0]
    cos, sin = (table[..., ::2] for table in tables)  # an entry per pair, in CodeGen's order
    return layer(hidden, position_ids=positions, position_embeddings=(sin, cos), attention_mask=mask)


SlimCodeGenAttention, SlimCodeGenModel, SlimCodeGenForCausalLM = slim_classes(
    SlimCodeGenConfig, codegen, attention=_Attention, decoder=_Decoder, model=_Model
)
FAMILY = Family.of(
    SlimCodeGenForCausalLM,
    rotary=rotary,
    embedding="transformer.wte.weight",
    # Four parts, each of queries, values and keys of a quarter of the heads, whatever device trained it.
    fused=Fused("qkv_proj", blocks=lambda config: 4, order="qvk"),
    run_layer=run_layer,
    buffers={"embed_positions": positions_table},
    left_out=(".attn.bias", ".attn.masked_bias", ".attn.causal_mask"),
)
