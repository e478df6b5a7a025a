"""Biases that depend on the key, as further numbers of keys and queries: attention operators need none of their own.

A bias of each key, such as a gate, is three numbers of half precision, which have the 24 bits of fp32; queries have a
one for each.

ALiBi (Press et al. 2022) adds ``slope * (key's position - query's)`` to each score, a slope per head. With
``position = 256 * high + low`` and ``slope / scale`` as the sum of three parts, each part adds four products: of
``256 * part`` and `high`, and of ``part`` and `low`, of the key and less those of the query. High and low are whole
numbers below 256, exact in any dtype, and three parts of half precision have the 24 bits of an fp32 slope, so that
products are exact up to position 65,535 also in half precision, of which the operators sum products in fp32. They come
before those of queries and keys themselves, and the query's beside the key's, so that sums stay small near the query:
what its position adds drops out of the softmax, but sums of partials would round far from 0.
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
    numbers = torch.stack([first, second], -1).flatten(-2)
    return torch.cat([F.pad(numbers, (0, WIDTH - numbers.shape[-1])), of], -1)


def with_key_bias(keys: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Keys ``[rows, kv_heads, tokens, head_dim + WIDTH]``, of ``head_dim`` and biases ``[rows, kv_heads, tokens]``."""
    parts = _parts(bias.float() / scale, keys.dtype)
    return torch.cat([keys, F.pad(torch.stack(parts, -1).to(keys.dtype), (0, WIDTH - _PARTS))], -1)


def with_ones(query: Tensor) -> Tensor:
    """Queries ``[rows, heads, tokens, head_dim + WIDTH]`` of keys with a bias."""
    return torch.cat([query, F.pad(torch.ones_like(query[..., :_PARTS]), (0, WIDTH - _PARTS))], -1)


def widened(values: Tensor) -> Tensor:
    """Values as wide as their keys."""
    return F.pad(values, (0, WIDTH))


@cache  # never let go, since captured graphs read them
def _slope_parts(slopes: tuple[float, ...], scale: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """``[heads, 2 * _PARTS]``: parts of each slope over the scale, times 256 and as they are."""
    with torch.inference_mode(False):
        parts = _parts(torch.tensor(slopes, dtype=torch.float64, device="cpu") / scale, dtype)
        return torch.stack([number for part in parts for number in (_LOW * part, part)], -1).to(dtype).to(device)


def _parts(numbers: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Numbers of half precision, in the dtype of `numbers`, that add up to them."""
    half = torch.bfloat16 if dtype.itemsize > 2 else dtype  # tensor cores round fp32 to 11 bits where that is on
    parts: list[Tensor] = []
    for _ in range(_PARTS):
        parts.append(numbers.to(half).to(numbers.dtype))
        numbers = numbers - parts[-1]
    return parts
