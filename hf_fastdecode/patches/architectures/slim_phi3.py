"""Phi-3 with slim attention: the fused projection of queries, keys and values becomes two, of queries and of keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.models.phi3 import modeling_phi3 as phi3

from ..._compat import all_tokens_without_cache
from ..decoder import SlimCausalLM, SlimRotaryDecoder, slim_classes
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, Fused
from ..slim_configs import SlimPhi3Config


class _Attention(SlimAttention):
    values_from = "qkv_proj"


class _Decoder(SlimRotaryDecoder):
    def key_positions(self, position_ids: Tensor, *args: Any) -> Tensor:
        """Positions up to the last query's: ``longrope`` goes by the largest position.

        Those of unused slots and padding may be larger, and would give keys other frequencies than queries.
        """
        return super().key_positions(position_ids, *args).clamp(max=position_ids.max())


class _Model(SlimCausalLM):
    prepare_inputs_for_generation = all_tokens_without_cache(phi3.Phi3ForCausalLM.prepare_inputs_for_generation)


SlimPhi3Attention, SlimPhi3Model, SlimPhi3ForCausalLM = slim_classes(
    SlimPhi3Config, phi3, attention=_Attention, decoder=_Decoder, model=_Model
)
FAMILY = Family.of(SlimPhi3ForCausalLM, fused=Fused("qkv_proj"), longrope=True)
