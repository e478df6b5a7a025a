"""GPT-Neo: global layers and local ones, each a window of slots; scores are not scaled.

`GPTNeoSelfAttention._attn` computes with the cached keys, and takes no mask for its windows.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention.interface import attend_shared
from ...attention.own_code import OwnCode
from ...attention.placeholders import SharedKV


def attend(
    module: Any, query: Tensor, key: SharedKV, value: SharedKV, attention_mask: Any = None
) -> tuple[Tensor, None]:
    """Stands in for `GPTNeoSelfAttention._attn`, which returns ``[rows, heads, tokens, head_dim]``."""
    window = module.config.window_size if module.attention_type == "local" else None
    return attend_shared(module, query, key, scaling=1.0, window=window).transpose(1, 2), None


GPT_NEO = OwnCode({"GPTNeoSelfAttention": {"_attn": attend}}, reads_masks=True)
