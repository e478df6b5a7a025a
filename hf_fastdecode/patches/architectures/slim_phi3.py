"""Phi-3 with slim attention: the fused projection of queries, keys and values becomes two, of queries and of keys."""

from __future__ import annotations

from torch import Tensor
from transformers.models.phi3 import modeling_phi3 as phi3

from ..._compat import all_tokens_without_cache
from ..decoder import SlimCausalLM, SlimRotaryDecoder, slim_classes
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, Fused
from ..layers.rotation import Rotation
from ..slim_configs import SlimPhi3Config


class _Attention(SlimAttention):
    values_from = "qkv_proj"


class _Decoder(SlimRotaryDecoder):
    def rotation(self, query_positions: Tensor, key_positions: Tensor | None) -> dict[str, Rotation]:
        """As the base class, without positions after the last query's: ``longrope`` goes by the largest position.

        Those of unused slots and padding may be larger, and would give keys other frequencies than queries.
        """
        if key_positions is not None:
            key_positions = key_positions.clamp(max=query_positions.max())
        return super().rotation(query_positions, key_positions)


class _Model(SlimCausalLM):
    prepare_inputs_for_generation = all_tokens_without_cache(phi3.Phi3ForCausalLM.prepare_inputs_for_generation)


SlimPhi3Attention, SlimPhi3Model, SlimPhi3ForCausalLM = slim_classes(
    SlimPhi3Config, phi3, attention=_Attention, decoder=_Decoder, model=_Model
)
FAMILY = Family.of(SlimPhi3ForCausalLM, fused=Fused("qkv_proj"), longrope=True)
