"""Falcon: a fused projection of three layouts, then RoPE or ALiBi.

`FalconAttention.forward` multiplies the cached keys itself, and repeats the KV heads of the new layout before it
caches them; here they are cached once. Its ALiBi is rounded to bf16 in models of any dtype, and so a bias of each key
of its own.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ...attention.interface import attend_shared
from ...attention.own_code import OwnCode
from ...errors import Unsupported
from ..layers.key_bias import biased_widths, widened, with_key_bias, with_ones
from .bloom import alibi_slopes


def attend(
    module: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_ids: Tensor,
    layer_past: Any,
    *args: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stands in for `FalconAttention.forward`."""
    query, key, value = split_heads(module, module.query_key_value(hidden_states))
    if alibi is None:
        assert position_embeddings is not None
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    else:
        if key.shape[1] < module.num_heads:
            raise Unsupported("its ALiBi is rounded for each query head, and several read the keys of one KV head")
        bias = rounded_alibi(module.num_heads, position_ids).expand(key.shape[:-1])
        # Falcon scales biases as it scales scores.
        query, key, value = with_ones(query), with_key_bias(key, bias, 1.0), widened(value)
    kv, _ = layer_past.update(key, value, module.layer_idx)
    out = attend_shared(module, query, kv, scaling=module.inv_norm_factor)[..., : module.head_dim]
    return module.dense(out.flatten(2)), None


def split_heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, ``[rows, heads or kv_heads, tokens, head_dim]``, of ``[rows, tokens, outputs]``."""
    grouped = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))  # each KV head after its queries
    query, key, value = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def rounded_alibi(heads: int, position_ids: Tensor) -> Tensor:
    """The bias of keys at positions ``[rows or 1, tokens]``, as Falcon rounds it: ``[rows or 1, heads, tokens]``."""
    return _slopes(heads, position_ids.device)[:, None] * position_ids[:, None]


@cache  # never let go, since captured graphs read them
def _slopes(heads: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(alibi_slopes(heads), device="cpu").bfloat16().to(device)


FALCON = OwnCode(
    {"FalconAttention": {"forward": attend}},
    reads_masks=True,
    ignores_positions=lambda config: config.alibi,
    compares_name=True,
    widths=lambda config, key, value: biased_widths(config, key, value) if config.alibi else (key, value),
    repeats_heads=lambda config: config.new_decoder_architecture,
)
