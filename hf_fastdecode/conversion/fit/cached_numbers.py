"""Formats of cached elements in tensors that any cache of transformers holds: 8 bits with scales, and positions.

Caches concatenate, reorder and crop one tensor of keys and one of values, whatever is in them. So each token's scales
follow its elements as bytes: ``[..., width + 2 * groups]`` of uint8, where a group is `head_dim` neighbouring
elements, and the last one may have fewer. With groups of 128 and more, scales are padded to a multiple of 8, so that
kernels can copy tokens by 16 bytes. A static cache's zeros read as zeros.

A scale is the group's largest magnitude over that of the dtype, in bf16. Elements are divided by the scale as it is
stored, so its rounding makes steps wider by at most a 256th; bf16, unlike fp16, has the range of fp32, so that no
token is too small or too large.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor
from torch.nn import functional as F

EIGHT_BITS: Final = (torch.int8, torch.float8_e4m3fn)
"""Dtypes that are stored with scales."""

DIGITS: Final = 3
"""Elements per position: digits of base 256, which every floating dtype, and a byte, holds exactly.

Positions are at least ``-(2**23)`` and below ``2**23``; negative ones are stored plus ``2**24``.
"""

_PLACES: Final = (2**16, 2**8, 1)
_LARGEST: Final = {torch.int8: 127.0, torch.float8_e4m3fn: torch.finfo(torch.float8_e4m3fn).max}
_SCALE: Final = torch.bfloat16


def store(x: Tensor, dtype: torch.dtype, group: int) -> Tensor:
    """Round ``[..., width]`` of any floating dtype for a cache; in `EIGHT_BITS`, `group` elements share a scale.

    Returns ``[..., width]`` in `dtype`; for 8 bits `stored_bytes` of uint8.
    """
    if dtype not in EIGHT_BITS:
        return x.to(dtype)
    width = x.shape[-1]
    x = x.to(torch.promote_types(x.dtype, torch.float32))  # quotients in bf16 would be rounded as coarsely as int8 is
    grouped = F.pad(x, (0, -width % group)).reshape(*x.shape[:-1], -(-width // group), group)
    largest = grouped.abs().amax(-1, keepdim=True)
    scales = _rounded((largest / _LARGEST[dtype]).float().clamp(min=torch.finfo(_SCALE).tiny))  # of zeros too
    steps = (grouped / scales).clamp(-_LARGEST[dtype], _LARGEST[dtype])  # a scale may be rounded down
    elements = (steps.round() if dtype == torch.int8 else steps).to(dtype)
    scale_bytes = _to_bytes(scales).flatten(-2)
    if padding := stored_bytes(width, dtype, group) - width - scale_bytes.shape[-1]:
        scale_bytes = F.pad(scale_bytes, (0, padding))
    return torch.cat([elements.view(torch.uint8).flatten(-2)[..., :width], scale_bytes], -1)


def _rounded(scales: Tensor) -> Tensor:
    """Round to bf16, in fp32, by the bits: compiled code (torch.compile) leaves out conversions."""
    rounded = ((scales.view(torch.int32) + 0x8000) & -0x10000).view(torch.float32)
    return torch.where(scales.isnan(), scales, rounded)  # the sum may make 0 of a NaN's bits


def _to_bytes(scales: Tensor) -> Tensor:
    """The bytes of `_rounded` scales in bf16, the low one first: ``[..., 1]`` fp32 to ``[..., 2]`` uint8.

    A view would need a last stride of 1, which tensors of size 1 may lack in compiled code (torch.compile).
    """
    bits = torch.where(scales.isnan(), 0x7FC0, scales.view(torch.int32) >> 16)
    return torch.cat([bits & 0xFF, (bits >> 8) & 0xFF], -1).to(torch.uint8)


def _from_bytes(scale_bytes: Tensor) -> Tensor:
    """The inverse: ``[..., 2 * groups]`` uint8 to ``[..., groups]`` fp32."""
    low, high = scale_bytes.to(torch.int32).unflatten(-1, (-1, 2)).unbind(-1)
    return ((high << 24) | (low << 16)).view(torch.float32)


def load(stored: Tensor, dtype: torch.dtype, group: int) -> Tensor:
    """Inverse of `store`, with its arguments: ``[..., width]`` in `dtype`; for 8 bits in fp32."""
    if dtype not in EIGHT_BITS:
        return stored
    if not stored.shape[-1]:  # no coordinates beside the keys
        return stored.float()
    elements, scale_bytes = views(stored, dtype, group)
    scales = _from_bytes(scale_bytes)
    return elements.float() * scales.repeat_interleave(group, -1)[..., : elements.shape[-1]]


def views(stored: Tensor, dtype: torch.dtype, group: int) -> tuple[Tensor, Tensor]:
    """View elements, ``[..., width]`` in `dtype`, and bytes of scales, ``[..., 2 * groups]``, in what `store` made."""
    size, at_once = stored.shape[-1], _scales_at_once(group)
    width = size - at_once * _SCALE.itemsize * -(-size // (at_once * (group + _SCALE.itemsize)))
    scales = -(-width // group)
    return stored[..., :width].view(dtype), stored[..., width : width + scales * _SCALE.itemsize]


def stored_bytes(width: int, dtype: torch.dtype, group: int) -> int:
    """Bytes per token of `width` elements, scales included."""
    at_once = _scales_at_once(group)
    scales = -(-width // (at_once * group)) * at_once if dtype in EIGHT_BITS else 0
    return width * dtype.itemsize + scales * _SCALE.itemsize


def _scales_at_once(group: int) -> int:
    """Scales are padded to a multiple of this: 1 for small groups, where padding would take many bytes."""
    return 8 if group >= 128 else 1


def with_positions(stored: Tensor, positions: Tensor) -> Tensor:
    """Append each token's position to its elements: ``[rows, 1, tokens, width + DIGITS]``.

    Elements are ``[rows, 1, tokens, width]`` as cached, in any floating dtype or uint8; positions are
    ``[rows or 1, tokens]``, int64, within the bounds of `DIGITS`.
    """
    digits = positions[..., None] // torch.tensor(_PLACES, device=positions.device) % 2**8
    return torch.cat([stored, digits[:, None].to(stored.dtype).expand(*stored.shape[:-1], DIGITS)], -1)


def without_positions(cached: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `with_positions`: the elements, and positions ``[rows, tokens]``."""
    digits = cached[:, 0, :, -DIGITS:].long()
    values = (digits * torch.tensor(_PLACES, device=cached.device)).sum(-1)
    return cached[..., :-DIGITS], torch.where(values < 2**23, values, values - 2**24)


def position_bytes(dtype: torch.dtype) -> int:
    return DIGITS * dtype.itemsize
