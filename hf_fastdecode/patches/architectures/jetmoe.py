"""JetMoE: each token's experts have queries of their own, all over the same KV heads.

`JetMoeAttention.forward` repeats keys and values once for each expert of a token before it calls the interface.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor

from ..._compat import takes_old_name
from ...attention.interface import attend_shared
from ...attention.own_code import OwnCode


@takes_old_name
def attend(
    module: Any,
    hidden_states: Tensor,
    attention_mask: Any = None,
    position_embeddings: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None, Tensor]:
    """Stands in for `JetMoeAttention.forward`."""
    query, router_logits, topology = module.experts.map(hidden_states)
    key, value = module.kv_proj(hidden_states).chunk(2, -1)
    heads = (*hidden_states.shape[:-1], -1, module.head_dim)
    query, key, value = (part.view(heads).transpose(1, 2) for part in (query, key, value))
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    kv, _ = cache.update(key, value, module.layer_idx)
    # Head `expert * kv_heads + i` reads KV head `i`; operators expect the queries of a KV head side by side.
    grouped = query.unflatten(1, (module.top_k, -1)).transpose(1, 2).flatten(1, 2)
    out = attend_shared(module, grouped, kv, scaling=module.scaling)  # [rows, tokens, heads, head_dim]
    of_experts = out.unflatten(2, (-1, module.top_k)).transpose(2, 3).flatten(3)  # [rows, tokens, experts, width]
    reduced = module.experts.reduce(of_experts, topology)
    return reduced.view(*hidden_states.shape[:-1], -1), None, router_logits


JETMOE = OwnCode(
    {"JetMoeAttention": {"forward": attend}},
    not_captured="the host reads how many tokens each of its experts gets (JetMoeTopKGating)",
)
