"""Doge: each key has a gate, made of its values, that is added to its scores.

`DogeAttention.forward` makes the gates of all cached keys anew in each pass, and adds them to the mask. Here a gate is
made once and cached with its key. Of rows longer than `keep_window_size`, Doge keeps the keys of the largest gates.

`DogeCDMoE.forward` makes the router logits of a token of those of two: its experts depend on all tokens of a pass.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._compat import takes_old_name
from ...attention.interface import attend_shared, outgrows
from ...attention.own_code import OwnCode
from ...errors import Unsupported
from ..layers.key_bias import biased_widths, widened, with_key_bias, with_ones


@takes_old_name
def attend(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `DogeAttention.forward`."""
    kept = module.keep_window_size
    if outgrows(kept):
        raise Unsupported(f"of longer rows its attention keeps the {kept} tokens of the largest gates")
    heads = (*hidden_states.shape[:-1], -1, module.head_dim)
    query = module.q_norm(module.q_proj(hidden_states).view(heads)).transpose(1, 2)
    key = module.k_norm(module.k_proj(hidden_states).view(heads)).transpose(1, 2)
    value = module.v_proj(hidden_states)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    query, key = rotate(query, key, *position_embeddings)
    gates = torch.exp(module.A * F.softplus(module.dt_proj(value))).transpose(-1, -2)  # [rows, kv_heads, tokens]
    key = with_key_bias(key, gates, module.scaling)
    value = widened(value.view(heads).transpose(1, 2))
    kv, _ = cache.update(key, value, module.layer_idx)
    window = module.config.sliding_window
    out = attend_shared(module, with_ones(query), kv, scaling=module.scaling, window=window)[..., : module.head_dim]
    return module.o_proj(out.flatten(2)), None


def refuse_experts(module: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """Stands in for `DogeCDMoE.forward`."""
    raise Unsupported("its router mixes the tokens of a pass")


DOGE = OwnCode(
    {"DogeAttention": {"forward": attend}, "DogeCDMoE": {"forward": refuse_experts}},
    reads_masks=True,
    widths=biased_widths,
)
