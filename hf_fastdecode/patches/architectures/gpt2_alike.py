"""Attention of GPT-2's shape whose `_attn` computes with the cached keys: Bark, GPT-NeoX Japanese and ImageGPT."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ...attention.interface import attend_shared
from ...attention.own_code import OwnCode
from ...attention.placeholders import SharedKV


def attend(
    module: Any, query: Tensor, key: SharedKV, value: SharedKV, attention_mask: Any = None
) -> tuple[Tensor, None]:
    """Stands in for `_attn`, which returns ``[rows, heads, tokens, head_dim]``."""
    return attend_shared(module, query, key, scaling=query.shape[-1] ** -0.5).transpose(1, 2), None


def attend_scaled(
    module: Any, query: Tensor, key: SharedKV, value: SharedKV, attention_mask: Any = None
) -> tuple[Tensor, None]:
    """Stands in for `ImageGPTAttention._attn`, of which the config chooses the scale."""
    scale = query.shape[-1] ** -0.5 if module.scale_attn_weights else 1.0
    if module.scale_attn_by_inverse_layer_idx:
        scale /= module.layer_idx + 1
    return attend_shared(module, query, key, scaling=scale).transpose(1, 2), None


GPT2_ALIKE = {
    "bark": OwnCode({"BarkSelfAttention": {"_attn": attend}}),
    "gpt_neox_japanese": OwnCode({"GPTNeoXJapaneseAttention": {"_attn": attend}}, reads_masks=True),
    "imagegpt": OwnCode(
        {"ImageGPTAttention": {"_attn": attend_scaled, "_upcast_and_reordered_attn": attend_scaled}},
    ),
}
"""By folder of ``transformers.models``."""
