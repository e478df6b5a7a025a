"""GPT-NeoX Japanese: `GPTNeoXJapaneseAttention._attn` computes with the cached keys, unlike GPT-NeoX's attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention.interface import SharedKV
from ...attention.own_code import OwnCode
from ...attention.stand_in_calls import attend_shared


def attend(
    module: Any, query: Tensor, key: SharedKV, value: SharedKV, attention_mask: Any = None
) -> tuple[Tensor, None]:
    """Stands in for `GPTNeoXJapaneseAttention._attn`, which returns ``[rows, heads, tokens, head_dim]``."""
    return attend_shared(module, query, key, scaling=1.0 / module.norm_factor).transpose(1, 2), None


GPT_NEOX_JAPANESE = OwnCode({"GPTNeoXJapaneseAttention": {"_attn": attend}}, reads_masks=True)
