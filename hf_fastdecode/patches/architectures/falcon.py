"""Falcon: a fused projection of three layouts, then RoPE or ALiBi.

`FalconAttention.forward` multiplies the cached keys itself, and repeats the KV heads of the new layout before it
caches them; here they are cached once.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from ...attention.own_code import OwnCode
from ...attention.stand_in_calls import attend_shared
from ..layers.key_bias import biased_widths, widened, with_key_positions, with_slopes
from .bloom import alibi_slopes


def attend(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor,
    layer_past: Any,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `FalconAttention.forward`."""
    query, key, value = split_heads(module, module.query_key_value(hidden_states))
    scale = module.inv_norm_factor
    if alibi is None:
        assert position_embeddings is not None
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    else:
        query = with_slopes(query, alibi_slopes(module.num_heads), 1.0)  # Falcon scales its bias as its scores
        key, value = with_key_positions(key, position_ids), widened(value)
    kv, _ = layer_past.update(key, value, module.layer_idx)
    out = attend_shared(module, query, kv, scaling=scale)[..., : module.head_dim]
    return module.dense(out.flatten(2)), None


def split_heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, ``[rows, heads or kv_heads, tokens, head_dim]``, of ``[rows, tokens, outputs]``."""
    if module.new_decoder_architecture:  # each KV head after its queries
        grouped = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))
        query, key, value = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    else:
        query, key, value = module._split_heads(fused)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


FALCON = OwnCode(
    {"FalconAttention": {"forward": attend}},
    reads_masks=True,
    widths=lambda config, key, value: biased_widths(config, key, value) if config.alibi else (key, value),
)
