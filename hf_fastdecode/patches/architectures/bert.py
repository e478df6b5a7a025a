"""Decoders of BERT's shape with attention code of their own: RemBERT, Megatron-BERT, BigBird, BLIP's and RoFormer.

BigBird decodes with full attention, whatever its config asks for; a model makes these layers in its first pass, so
that its first call runs stock. RoFormer rotates keys, and by its config values, at positions that begin at the cache's
length.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._compat import takes_old_name
from ...attention.interface import attend_shared
from ...attention.own_code import OwnCode
from .bart import embed_positions


@takes_old_name
def attend(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    cache: Any = None,
    output_attentions: bool = False,
    sinusoidal_pos: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `forward` of layers without cross attention."""
    query, key, value = (
        projection(hidden_states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)
        for projection in (module.query, module.key, module.value)
    )
    if sinusoidal_pos is not None:
        places = sinusoidal_pos[0, 0][:, None]  # [rows or 1, 1, tokens, head_dim], see `embed_positions`
        if module.rotary_value:
            query, key, value = module.apply_rotary_position_embeddings(places, query, key, value)
        else:
            query, key = module.apply_rotary_position_embeddings(places, query, key)
    kv, _ = cache.update(key, value, module.layer_idx)
    return attend_shared(module, query, kv, scaling=module.attention_head_size**-0.5).flatten(2), None


BERT_FAMILY = {
    **{
        folder: OwnCode({name: {"forward": attend}}, reads_masks=True)
        for folder, name in {
            "big_bird": "BigBirdSelfAttention",
            "blip": "BlipTextSelfAttention",
            "megatron_bert": "MegatronBertSelfAttention",
            "rembert": "RemBertSelfAttention",
        }.items()
    },
    "roformer": OwnCode(
        {
            "RoFormerSelfAttention": {"forward": attend},
            "RoFormerSinusoidalPositionalEmbedding": {"forward": embed_positions},
        },
        reads_masks=True,
        counts_padding=True,
    ),
}
"""By folder of ``transformers.models``."""
