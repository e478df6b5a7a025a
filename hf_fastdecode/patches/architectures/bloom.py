"""BLOOM: a fused projection and ALiBi, which `BloomAttention.forward` adds to scores that it computes itself.

transformers rounds the bias to the model's dtype; here it is exact.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from ...attention.interface import attend_shared, positions_of_pass
from ...attention.own_code import OwnCode
from ...errors import Unsupported
from ..layers import key_bias
from ..layers.key_bias import biased_widths, widened, with_key_positions, with_query_positions


def attend(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `BloomAttention.forward`."""
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise Unsupported("with slow_but_exact its attention leaves the bias of its output projection out")
    fused = module.query_key_value(hidden_states).unflatten(-1, (module.num_heads, 3, module.head_dim))
    query, key, value = fused.transpose(1, 2).unbind(3)
    bias = positions_of_pass(), alibi_slopes(module.num_heads), module.inv_norm_factor
    query, key = with_query_positions(query, *bias), with_key_positions(key, *bias)
    kv, _ = layer_past.update(key, widened(value), module.layer_idx)
    out = attend_shared(module, query, kv, scaling=module.inv_norm_factor)[..., : module.head_dim]
    projected = module.dense(out.flatten(2))
    return F.dropout(projected, module.hidden_dropout, module.training) + residual, None


@cache
def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head: a geometric series, and for other numbers than powers of two, more between them."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (index + 1) / power) for index in range(power)]
    return (*slopes, *(2 ** (-4 * (2 * index + 1) / power) for index in range(heads - power)))


BLOOM = OwnCode(
    {"BloomAttention": {"forward": attend}},
    reads_masks=True,
    takes_no_positions=True,
    most_tokens=lambda config: key_bias.MOST_POSITIONS,
    widths=biased_widths,
)
