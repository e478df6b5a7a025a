"""BLOOM, MPT, Falcon and Doge: scores with a bias that depends on the key, cached as further elements of keys.

Attention operators then need no support for biases. A bias of each key, such as a gate, is three elements of half
precision, which have the 24 bits of fp32; queries have a one for each.

ALiBi (Press et al. 2022) adds ``slope * (key's position - query's)`` to each score, a slope per head. With
``position = 256 * high + low`` and ``slope / scale`` as the sum of three parts, each part adds four products: of
``256 * part`` and `high`, and of ``part`` and `low`, of the key and less those of the query. All of them are exact up
to position 65,535, also in half precision, of which the operators sum products in fp32. They come before those of
queries and keys themselves, and the query's beside the key's, so that sums stay small near the query: what its
position adds drops out of the softmax, but sums of partials would round far from 0.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from ..._compat import doge_is_causal, takes_old_name
from ...attention.interface import attend_shared, outgrows, positions_of_pass
from ...attention.overrides import OwnCode
from ...errors import Unsupported

WIDTH: Final = 16
"""Elements that keys, queries and values get; kernels take multiples of 16, and values as wide as keys."""

_PARTS: Final = 3
_LOW: Final = 256
MOST_POSITIONS: Final = _LOW * _LOW


def biased_widths(config: Any, key: int, value: int) -> tuple[int, int]:
    return key + WIDTH, value + WIDTH


def with_key_positions(keys: Tensor, positions: Tensor, slopes: tuple[float, ...], scale: float) -> Tensor:
    """Keys ``[rows, heads, tokens, WIDTH + head_dim]``, of ``head_dim`` at positions ``[rows or 1, tokens]``."""
    digits, parts = _digits(keys, positions), _slope_parts(slopes, scale, keys.dtype, keys.device)
    return _with_pairs(digits, parts[:, None].expand(digits.shape), keys)


def with_query_positions(query: Tensor, positions: Tensor, slopes: tuple[float, ...], scale: float) -> Tensor:
    """Queries of such keys: ``[rows, heads, tokens, WIDTH + head_dim]``."""
    digits, parts = _digits(query, positions), _slope_parts(slopes, scale, query.dtype, query.device)
    return _with_pairs(parts[:, None].expand(digits.shape), -digits, query)


def _digits(of: Tensor, positions: Tensor) -> Tensor:
    """High and low of positions, once for each part of a slope: ``[rows, heads, tokens, 2 * _PARTS]``."""
    digits = torch.stack([positions // _LOW, positions % _LOW] * _PARTS, -1).to(of.dtype)
    return digits[:, None].expand(*of.shape[:-1], -1)


def _with_pairs(first: Tensor, second: Tensor, of: Tensor) -> Tensor:
    elements = torch.stack([first, second], -1).flatten(-2)
    return torch.cat([F.pad(elements, (0, WIDTH - elements.shape[-1])), of], -1)


def with_key_bias(keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Keys ``[rows, kv_heads, tokens, head_dim + WIDTH]``, of ``head_dim`` and biases ``[rows, kv_heads, tokens]``."""
    parts = _parts(bias.float() / scale, keys.dtype)
    return torch.cat([keys, F.pad(torch.stack(parts, -1).to(keys.dtype), (0, WIDTH - _PARTS))], -1)


def with_ones(query: Tensor) -> Tensor:
    """Queries ``[rows, heads, tokens, head_dim + WIDTH]`` of keys with a bias."""
    return torch.cat([query, F.pad(torch.ones_like(query[..., :_PARTS]), (0, WIDTH - _PARTS))], -1)


def widened(values: Tensor) -> Tensor:
    return F.pad(values, (0, WIDTH))


@cache  # never let go, since captured graphs read them
def _slope_parts(slopes: tuple[float, ...], scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[heads, 2 * _PARTS]``: parts of each slope over the scale, times 256 and as they are."""
    with torch.inference_mode(False):
        parts = _parts(torch.tensor(slopes, dtype=torch.float64, device="cpu") / scale, dtype)
        return torch.stack([number for part in parts for number in (_LOW * part, part)], -1).to(dtype).to(device)


def _parts(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Split `values` into `_PARTS` summands that half precision holds exactly, in the dtype of `values`."""
    half = torch.bfloat16 if dtype.itemsize > 2 else dtype  # tensor cores round fp32 to 11 bits where that is on
    parts: list[Tensor] = []
    for _ in range(_PARTS):
        parts.append(values.to(half).to(values.dtype))
        values = values - parts[-1]
    return parts


def attend_bloom(
    module: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any,
    *args: Any,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Overrides `BloomAttention.forward`, which rounds ALiBi to the model's dtype; here it is exact."""
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise Unsupported("with slow_but_exact its attention leaves the bias of its output projection out")
    fused = module.query_key_value(hidden_states).unflatten(-1, (module.num_heads, 3, module.head_dim))
    query, key, value = fused.transpose(1, 2).unbind(3)
    bias = positions_of_pass(), bloom_slopes(module.num_heads), module.inv_norm_factor
    query, key = with_query_positions(query, *bias), with_key_positions(key, *bias)
    kv, _ = layer_past.update(key, widened(value), module.layer_idx)
    out = attend_shared(module, query, kv, scaling=module.inv_norm_factor)[..., : module.head_dim]
    projected = module.dense(out.flatten(2))
    return F.dropout(projected, module.hidden_dropout, module.training) + residual, None


@cache
def bloom_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head: a geometric series, and for head counts other than powers of two, more between them."""
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (index + 1) / power) for index in range(power)]
    return (*slopes, *(2 ** (-4 * (2 * index + 1) / power) for index in range(heads - power)))


@takes_old_name
def attend_mpt(
    module: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    cache: Any = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Overrides `MptAttention.forward`: ALiBi over cache slots, which count what a mask hides inside a prompt."""
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = fused.unflatten(-1, (3, module.n_heads, module.head_dim)).transpose(1, 3).unbind(2)
    bias = positions_of_pass(), mpt_slopes(module.n_heads), module.softmax_scale
    query, key, value = with_query_positions(query, *bias), with_key_positions(key, *bias), widened(value)
    kv, _ = cache.update(key, value, module.layer_idx)
    out = attend_shared(module, query, kv, scaling=module.softmax_scale)[..., : module.head_dim]
    return module.out_proj(out.flatten(2)), None


@cache
def mpt_slopes(heads: int) -> tuple[float, ...]:
    """The slope of each head, of a series for the next power of two, every other one first."""
    power = 2 ** math.ceil(math.log2(heads))
    slopes = [2 ** (-8 * (index + 1) / power) for index in range(power)]  # whatever `alibi_bias_max` says
    return tuple(slopes if power == heads else (slopes[1::2] + slopes[::2])[:heads])


def attend_falcon(
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
    """Overrides `FalconAttention.forward`: a fused projection of three layouts, then RoPE or ALiBi.

    Falcon repeats the KV heads of the new layout before it caches them; here they are cached once. Its ALiBi is
    rounded to bf16 in models of any dtype, and so a bias of each key.
    """
    query, key, value = _split_falcon_heads(module, module.query_key_value(hidden_states))
    if alibi is None:
        assert position_embeddings is not None
        rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
        query, key = rotate(query, key, *position_embeddings)
    else:
        if key.shape[1] < module.num_heads:
            raise Unsupported("its ALiBi is rounded for each query head, and several read the keys of one KV head")
        bias = _rounded_alibi(module.num_heads, position_ids).expand(key.shape[:-1])
        # Falcon scales biases as it scales scores.
        query, key, value = with_ones(query), with_key_bias(key, bias, 1.0), widened(value)
    kv, _ = layer_past.update(key, value, module.layer_idx)
    out = attend_shared(module, query, kv, scaling=module.inv_norm_factor)[..., : module.head_dim]
    return module.dense(out.flatten(2)), None


def _split_falcon_heads(module: Any, fused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values, ``[rows, heads or kv_heads, tokens, head_dim]``, of ``[rows, tokens, outputs]``."""
    grouped = fused.unflatten(-1, (module.num_kv_heads, -1, module.head_dim))  # each KV head after its queries
    query, key, value = grouped[..., :-2, :].flatten(2, 3), grouped[..., -2, :], grouped[..., -1, :]
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _rounded_alibi(heads: int, position_ids: Tensor) -> Tensor:
    """The bias of keys at positions ``[rows or 1, tokens]``, as Falcon rounds it: ``[rows or 1, heads, tokens]``."""
    return _rounded_slopes(heads, position_ids.device)[:, None] * position_ids[:, None]


@cache  # never let go, since captured graphs read them
def _rounded_slopes(heads: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.tensor(bloom_slopes(heads), device="cpu").bfloat16().to(device)


@takes_old_name
def attend_doge(
    module: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: Any = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Overrides `DogeAttention.forward`: each key has a gate, made of its values, that is added to its scores.

    Doge makes the gates of all cached keys anew in each pass, and adds them to the mask; here a gate is made once and
    cached with its key. Of rows longer than `keep_window_size`, Doge keeps the keys of the largest gates.
    """
    modelling = sys.modules[type(module).__module__]
    if not doge_is_causal(modelling):
        raise Unsupported("without padding its prompts attend to later tokens, in this release of transformers")
    kept = module.keep_window_size
    if outgrows(kept):
        raise Unsupported(f"of longer rows its attention keeps the {kept} tokens of the largest gates")
    heads = (*hidden_states.shape[:-1], -1, module.head_dim)
    query = module.q_norm(module.q_proj(hidden_states).view(heads)).transpose(1, 2)
    key = module.k_norm(module.k_proj(hidden_states).view(heads)).transpose(1, 2)
    value = module.v_proj(hidden_states)
    query, key = modelling.apply_rotary_pos_emb(query, key, *position_embeddings)
    gates = torch.exp(module.A * F.softplus(module.dt_proj(value))).transpose(-1, -2)  # [rows, kv_heads, tokens]
    key = with_key_bias(key, gates, module.scaling)
    value = widened(value.view(heads).transpose(1, 2))
    kv, _ = cache.update(key, value, module.layer_idx)
    window = module.config.sliding_window
    out = attend_shared(module, with_ones(query), kv, scaling=module.scaling, window=window)[..., : module.head_dim]
    return module.o_proj(out.flatten(2)), None


def refuse_doge_experts(module: Any, hidden_states: Tensor, **kwargs: Any) -> Any:
    """Overrides `DogeCDMoE.forward`, which makes router logits of a token of those of two tokens of a pass."""
    raise Unsupported("its router mixes the tokens of a pass")


BIASED_KEYS = {
    "bloom": OwnCode(
        {"BloomAttention": {"forward": attend_bloom}},
        reads_masks=True,
        takes_no_positions=True,
        most_tokens=lambda config: MOST_POSITIONS,
        widths=biased_widths,
    ),
    "doge": OwnCode(
        {"DogeAttention": {"forward": attend_doge}, "DogeCDMoE": {"forward": refuse_doge_experts}},
        reads_masks=True,
        widths=biased_widths,
    ),
    "falcon": OwnCode(
        {"FalconAttention": {"forward": attend_falcon}},
        reads_masks=True,
        compares_name=True,
        ignores_positions=lambda config: config.alibi,
        widths=lambda config, key, value: biased_widths(config, key, value) if config.alibi else (key, value),
        repeats_heads=lambda config: config.new_decoder_architecture,
    ),
    "mpt": OwnCode(
        {"MptAttention": {"forward": attend_mpt}},
        reads_masks=True,
        takes_no_positions=True,
        counts_hidden=True,
        most_tokens=lambda config: min(MOST_POSITIONS, config.max_seq_len),  # beyond it, transformers raises
        widths=biased_widths,
    ),
}
"""Overrides by folder of ``transformers.models``."""
