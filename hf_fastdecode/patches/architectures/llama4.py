"""Llama 4: queries of layers without RoPE are scaled by how far they stand in the text.

`Llama4TextAttention.forward` counts from the length of the cache. That is the position of a token in a row without
padding, but not in a pass that several prompts share.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._compat import cache_in, with_cache
from ...attention.interface import positions_of_pass, shared_context_attention
from ...attention.own_code import OwnCode


def attend(
    module: Any, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    """Stands in for `Llama4TextAttention.forward`."""
    cache = args[0] if args else cache_in(kwargs)
    if module.use_rope or not module.attn_temperature_tuning:
        out: tuple[Tensor, Tensor | None] = type(module).forward(
            module, hidden_states, position_embeddings, attention_mask, **with_cache(kwargs, cache)
        )
        return out
    query, key, value = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    steps = torch.floor((positions_of_pass().float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0  # [rows or 1, tokens]
    query = (query * scales[:, None, :, None]).to(query.dtype)
    kv, _ = cache.update(key, value, module.layer_idx)
    attended, _ = shared_context_attention(module, query, kv, kv, attention_mask, module.scaling)
    return module.o_proj(attended.flatten(2)), None


LLAMA4 = OwnCode(
    {"Llama4TextAttention": {"forward": attend}},
    scales_from=lambda config: int(config.floor_scale) if config.attn_temperature_tuning else None,
)
