"""DiffLlama: each head attends to two values, those of a KV head in either half of them (Ye et al. 2024, eq. 1).

`DiffLlamaAttention.forward` calls the interface twice, each time with the keys of all KV heads and half of the values,
repeated. Here the two values of a KV head are cached side by side, and read by one call. Keys get as many zeros:
kernels of captured steps take keys and values of one width.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import takes_old_name
from ...attention.interface import attend_shared
from ...attention.own_code import OwnCode


@takes_old_name
def attend(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `DiffLlamaAttention.forward`."""
    query, key, value = (
        projection(hidden_states).unflatten(-1, (-1, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    both = torch.cat(value.chunk(2, 1), -1).repeat(1, 2, 1, 1)  # [rows, kv_heads, tokens, 2 * head_dim]
    query, key = (F.pad(part, (0, module.head_dim)) for part in (query, key))
    kv, _ = cache.update(key, both, module.layer_idx)
    out = attend_shared(module, query, kv, scaling=module.scaling)  # [rows, tokens, heads, 2 * head_dim]
    minuend, subtrahend = out.chunk(2, 2)
    first, second = (
        torch.exp((one * other).sum(-1, dtype=torch.float32)).to(query.dtype)
        for one, other in ((module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2))
    )
    difference = minuend - (first - second + module.lambda_init) * subtrahend
    normed = (1 - module.lambda_init) * module.groupnorm(difference)
    return module.o_proj(normed.flatten(2)), None


DIFFLLAMA = OwnCode(
    {"DiffLlamaAttention": {"forward": attend}}, widths=lambda config, key, value: (2 * key, 2 * value)
)
