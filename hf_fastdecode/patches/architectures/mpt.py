"""MPT: a fused projection, and ALiBi over the slots of the cache, which count what a mask hides inside a prompt."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from torch import Tensor

from ..._compat import takes_old_name
from ...attention.interface import attend_shared, positions_of_pass
from ...attention.own_code import OwnCode
from ..layers import key_bias
from ..layers.key_bias import biased_widths, widened, with_key_positions, with_query_positions

_LARGEST = 8  # exponent of the smallest slope; `MptModel` leaves `alibi_bias_max` of the config out


@takes_old_name
def attend(
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `MptAttention.forward`."""
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = fused.unflatten(-1, (3, module.n_heads, module.head_dim)).transpose(1, 3).unbind(2)
    bias = positions_of_pass(), alibi_slopes(module.n_heads), module.softmax_scale
    query, key, value = with_query_positions(query, *bias), with_key_positions(key, *bias), widened(value)
    kv, _ = cache.update(key, value, module.layer_idx)
    out = attend_shared(module, query, kv, scaling=module.softmax_scale)[..., : module.head_dim]
    return module.out_proj(out.flatten(2)), None


@cache
def alibi_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head, of a series for the next power of two, every other one first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-_LARGEST * (index + 1) / power) for index in range(power)]
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])


MPT = OwnCode(
    {"MptAttention": {"forward": attend}},
    reads_masks=True,
    takes_no_positions=True,
    counts_hidden=True,
    most_tokens=lambda config: min(key_bias.MOST_POSITIONS, config.max_seq_len),  # beyond it, transformers raises
    widths=biased_widths,
)
