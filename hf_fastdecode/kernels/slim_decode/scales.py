"""Scales of keys and V-coordinates in 8 bits, as the slim decode kernel takes them; without Triton."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

EIGHT_BITS: Final = (torch.int8, torch.float8_e4m3fn)
"""Dtypes that are read with scales."""

SCALE_BYTES: Final = 2
"""Bytes of a scale, in bf16."""


class Scales(NamedTuple):
    """Views of the scales in a cache of 8 bits, one per token and group of ``head_dim`` neighbouring numbers.

    A cache holds each token's scales behind its numbers, in bf16. They are viewed as bytes, since they begin at odd
    addresses behind an odd number of V-coordinates.

    Attributes:
        keys: ``[rows, slots, 2 * heads]`` uint8, with the strides of the keys.
        coordinates: ``[rows, slots, 2 * ceil(r / head_dim)]`` uint8, with the strides of the V-coordinates.
    """

    keys: Tensor
    coordinates: Tensor


def check_scales(keys: Tensor, coordinates: Tensor, head_dim: int, scales: Scales | None) -> None:
    """Check the scales of a cache, whose other shapes have been checked.

    Raises:
        ValueError: There are none for 8 bits, or some for other keys, or they do not belong to these.
    """
    if keys.dtype not in EIGHT_BITS:
        if scales is not None:
            raise ValueError(f"scales are for keys in int8 and float8_e4m3fn, got {keys.dtype}; pass None")
        return
    if scales is None:
        raise ValueError(f"keys in {keys.dtype} need scales, got None; pass Scales, views of what follows the numbers")
    for name, part, own in (("keys", keys, scales.keys), ("coordinates", coordinates, scales.coordinates)):
        shape = (*part.shape[:2], SCALE_BYTES * -(-part.shape[2] // head_dim))
        if own.shape != shape or own.dtype != torch.uint8 or own.device != keys.device:
            raise ValueError(
                f"scales of {name} must be {list(shape)} uint8 on {keys.device}, got {list(own.shape)} {own.dtype} on "
                f"{own.device}"
            )
        if part.numel() and own.stride() != part.stride():
            raise ValueError(
                f"scales of {name} must have the strides of {name}, {part.stride()}, got {own.stride()}; view both in "
                "the tensor that holds them"
            )
