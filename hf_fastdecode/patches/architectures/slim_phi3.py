"""Phi-3 with slim attention: the fused projection of queries, keys and values becomes two, of queries and of keys."""

from __future__ import annotations

from torch import Tensor
from transformers.models.phi3.modeling_phi3 import (
    Phi3Attention,
    Phi3DecoderLayer,
    Phi3ForCausalLM,
    Phi3Model,
    Phi3RotaryEmbedding,
)

from ..._compat import all_tokens_without_cache
from ..decoder import SlimCausalLM, SlimRotaryDecoder
from ..layers.attention_layer import SlimAttention
from ..layers.family import Family, Fused
from ..layers.rotation import Rotation
from ..slim_configs import SlimPhi3Config


class SlimPhi3Attention(SlimAttention, Phi3Attention):
    """Attention of a layer that caches no values."""

    values_from = "qkv_proj"


class SlimPhi3Model(SlimRotaryDecoder, Phi3Model):
    """Phi-3's decoder, with slim attention."""

    config_class = SlimPhi3Config
    slim_attention = SlimPhi3Attention

    def rotation(self, query_positions: Tensor, key_positions: Tensor | None) -> dict[str, Rotation]:
        """As the base class, without positions behind the last query's: ``longrope`` goes by the largest position.

        Those of unused slots and padding may be larger, and would give keys other frequencies than queries.
        """
        if key_positions is not None:
            key_positions = key_positions.clamp(max=query_positions.max())
        return super().rotation(query_positions, key_positions)


class SlimPhi3ForCausalLM(SlimCausalLM, Phi3ForCausalLM):
    """Phi-3 for generation, with slim attention."""

    config_class = SlimPhi3Config
    slim_decoder = SlimPhi3Model
    prepare_inputs_for_generation = all_tokens_without_cache(Phi3ForCausalLM.prepare_inputs_for_generation)


FAMILY = Family(
    "Phi3ForCausalLM",
    SlimPhi3ForCausalLM,
    SlimPhi3Config,
    Phi3DecoderLayer,
    Phi3RotaryEmbedding,
    fused=Fused("qkv_proj"),
    longrope=True,
)
FAMILY.register()
