"""Positions of cached tokens, as numbers beside theirs, in tensors that any cache of transformers holds.

Caches reorder, crop and repeat these with the tokens. A position is three digits of base 256, which every floating
dtype, and a byte, holds exactly. Negative ones are counted down from ``256 ** 3``.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

DIGITS: Final = 3
"""Numbers per token; positions are at least ``-(2**23)`` and below ``2**23``."""

_PLACES: Final = (2**16, 2**8, 1)


def with_positions(stored: Tensor, positions: Tensor) -> Tensor:
    """Append positions.

    Args:
        stored: ``[rows, 1, tokens, width]`` as cached, in any floating dtype or uint8.
        positions: ``[rows or 1, tokens]``, int64, within the bounds of `DIGITS`.

    Returns:
        ``[rows, 1, tokens, width + DIGITS]``.
    """
    digits = positions[..., None] // torch.tensor(_PLACES, device=positions.device) % 2**8
    return torch.cat([stored, digits[:, None].to(stored.dtype).expand(*stored.shape[:-1], DIGITS)], -1)


def without_positions(cached: Tensor) -> tuple[Tensor, Tensor]:
    """Inverse of `with_positions`: what was stored, and positions ``[rows, tokens]``."""
    digits = cached[:, 0, :, -DIGITS:].long()
    numbers = (digits * torch.tensor(_PLACES, device=cached.device)).sum(-1)
    return cached[..., :-DIGITS], torch.where(numbers < 2**23, numbers, numbers - 2**24)


def position_bytes(dtype: torch.dtype) -> int:
    """Bytes of a position beside numbers of a dtype."""
    return DIGITS * dtype.itemsize
