"""XGLM: an attention layer of the BART family's shape that multiplies the cached keys itself."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention.own_code import OwnCode
from ...attention.stand_in_calls import attend_shared


def attend(
    module: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    cache: Any = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `XGLMAttention.forward`, of layers without cross attention."""
    query, key, value = (
        projection(hidden_states).unflatten(-1, (module.num_heads, module.head_dim)).transpose(1, 2)
        for projection in (module.q_proj, module.k_proj, module.v_proj)
    )
    kv, _ = (past_key_values if cache is None else cache).update(key, value, module.layer_idx)
    return module.out_proj(attend_shared(module, query, kv, scaling=module.scaling).flatten(2)), None


XGLM = OwnCode({"XGLMAttention": {"forward": attend}}, reads_masks=True)
