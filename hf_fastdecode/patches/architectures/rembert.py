"""RemBERT and Megatron-BERT as decoders: BERT's attention, but by their own code."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention.own_code import OwnCode
from ...attention.stand_in_calls import attend_shared


def attend(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    encoder_hidden_states: Any = None,
    cache: Any = None,
    output_attentions: bool = False,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `forward` of `RemBertSelfAttention` and `MegatronBertSelfAttention`, without cross attention."""
    query, key, value = (
        projection(hidden_states).unflatten(-1, (-1, module.attention_head_size)).transpose(1, 2)
        for projection in (module.query, module.key, module.value)
    )
    kv, _ = (past_key_values if cache is None else cache).update(key, value, module.layer_idx)
    return attend_shared(module, query, kv, scaling=module.attention_head_size**-0.5).flatten(2), None


REMBERT = OwnCode({"RemBertSelfAttention": {"forward": attend}}, reads_masks=True)
MEGATRON_BERT = OwnCode({"MegatronBertSelfAttention": {"forward": attend}}, reads_masks=True)
