"""Biases that depend on the key, as further numbers of keys and queries: attention operators need none of their own.

A bias of each key, such as a gate, is three numbers of half precision, which have the 24 bits of fp32; queries have a
one for each.

ALiBi (Press et al. 2022) adds ``slope * position`` of the key to each score, a slope per query head; what the query's
position would add is the same for all its keys, and drops out of the softmax. With ``position = 256 * high + low``,
keys get ``(high, high, high, low, low, low)`` and queries three parts of ``256 * slope / scale``, then of
``slope / scale``. High and low are whole numbers below 256, exact in any dtype, and three parts of half precision
have the 24 bits of an fp32 slope, so that the bias is exact up to position 65,535 also in half precision, of which
the operators sum products in fp32.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

WIDTH: Final = 16
"""Numbers that keys, queries and values get; kernels take multiples of 16, and values as wide as keys."""

_PARTS: Final = 3
_LOW: Final = 256
MOST_POSITIONS: Final = _LOW * _LOW


def biased_widths(config: Any, key: int, value: int) -> tuple[int, int]:
    """Numbers of a head's key and value with the bias, see `OwnCode.widths`."""
    return key + WIDTH, value + WIDTH


def with_key_positions(keys: Tensor, positions: Tensor) -> Tensor:
    """Keys ``[rows, kv_heads, tokens, head_dim + WIDTH]``, of ``head_dim`` and positions ``[rows or 1, tokens]``."""
    high, low = positions // _LOW, positions % _LOW
    numbers = torch.stack([*[high] * _PARTS, *[low] * _PARTS], -1).to(keys.dtype)  # [rows or 1, tokens, 6]
    numbers = F.pad(numbers, (0, WIDTH - 2 * _PARTS))[:, None].expand(*keys.shape[:-1], -1)
    return torch.cat([keys, numbers], -1)


def with_key_bias(keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Keys ``[rows, kv_heads, tokens, head_dim + WIDTH]``, of ``head_dim`` and biases ``[rows, kv_heads, tokens]``."""
    parts = _parts(bias.float() / scale, keys.dtype)
    return torch.cat([keys, F.pad(torch.stack(parts, -1).to(keys.dtype), (0, WIDTH - _PARTS))], -1)


def with_ones(query: Tensor) -> Tensor:
    """Queries ``[rows, heads, tokens, head_dim + WIDTH]`` of keys with a bias."""
    return torch.cat([query, F.pad(torch.ones_like(query[..., :_PARTS]), (0, WIDTH - _PARTS))], -1)


def with_slopes(query: Tensor, slopes: tuple[float, ...], scale: float) -> Tensor:
    """Queries ``[rows, heads, tokens, head_dim + WIDTH]``, of ``head_dim``, with a slope per head."""
    numbers = _slope_parts(slopes, scale, query.dtype, query.device)[:, None].expand(*query.shape[:-1], -1)
    return torch.cat([query, numbers], -1)


def widened(values: Tensor) -> Tensor:
    """Values as wide as their keys."""
    return F.pad(values, (0, WIDTH))


@cache  # never let go, since captured graphs read them
def _slope_parts(slopes: tuple[float, ...], scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[heads, WIDTH]``: parts of each slope over the scale."""
    with torch.inference_mode(False):
        parts = _parts(torch.tensor(slopes, dtype=torch.float64, device="cpu") / scale, dtype)
        numbers = torch.stack([*[_LOW * part for part in parts], *parts], -1)
        return F.pad(numbers, (0, WIDTH - 2 * _PARTS)).to(dtype).to(device)


def _parts(numbers: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of half precision, in the dtype of `numbers`, that add up to them."""
    half = torch.bfloat16 if dtype.itemsize > 2 else dtype  # tensor cores round fp32 to 11 bits where that is on
    parts: list[Tensor] = []
    for _ in range(_PARTS):
        parts.append(numbers.to(half).to(numbers.dtype))
        numbers = numbers - parts[-1]
    return parts
