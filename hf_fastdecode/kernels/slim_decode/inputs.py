"""What `slim_decode` takes, without Triton: RoPE tables, scales of keys in 8 bits, and the limits of its kernels."""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability
from ..failures import Kernel, failure
from ..forest_decode.limits import HALF_PRECISION, refusal_of_any_shape

TURNS = 64
"""Positions in the table of rotations within a tile, whose largest size it is, of the kernel on clusters."""


class RotaryTables(NamedTuple):
    """RoPE of cached keys: "rotate half" over the first ``rotary_dim`` numbers of a head.

    Attributes:
        cos: ``[rows or 1, slots, rotary_dim / 2]`` fp32, contiguous.
        sin: Likewise.
        turns: ``[64, 2, rotary_dim / 2]`` fp32, contiguous: cosines and sines of the rotations within a tile, by 0
            to 63 positions; None where a row's positions may not rise by one from slot to slot.
    """

    cos: Tensor
    sin: Tensor
    turns: Tensor | None = None

    @classmethod
    def of(cls, frequencies: Tensor, positions: Tensor) -> RotaryTables:
        """Tables of consecutive positions.

        Args:
            frequencies: ``[rotary_dim / 2]``: radians per position.
            positions: ``[rows or 1, slots]``, rising by one from slot to slot.
        """
        angles = positions[..., None].double() * frequencies.double()
        turns = torch.arange(TURNS, device=frequencies.device)[:, None].double() * frequencies.double()
        return cls(angles.cos().float(), angles.sin().float(), torch.stack([turns.cos(), turns.sin()], 1).float())


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
    """Raise ValueError for scales that do not belong to a cache, whose other shapes have been checked."""
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


MAX_HEAD_DIM = 256
MAX_HEADS = 128
MAX_ROWS = 1024
FP8_CAPABILITY = (8, 9)


def refusal(query: Tensor, keys: Tensor, coordinates: Tensor) -> str | None:
    """Why `slim_decode` does not support these tensors; None when it does.

    Args:
        query: ``[rows, heads, queries, head_dim]``.
        keys: ``[rows, slots, heads * head_dim]``; of 8 bits without their scales.
        coordinates: ``[rows, slots, r]``.
    """
    if reason := refusal_of_any_shape(keys, query, coordinates, dtypes=(*HALF_PRECISION, *EIGHT_BITS)):
        return reason
    fp8_on_gpu = keys.dtype == torch.float8_e4m3fn and keys.device.type == "cuda"
    if fp8_on_gpu and compute_capability(keys.device) < FP8_CAPABILITY:  # where Triton does not convert it
        least, found = (".".join(map(str, part)) for part in (FP8_CAPABILITY, compute_capability(keys.device)))
        return f"it takes float8_e4m3fn from compute capability {least}, got {found}; int8 runs here"
    rows, heads, queries, head_dim = query.shape
    if queries != 1:  # averages of all columns for each query do not fit in the registers
        return f"it takes 1 query at once, got {queries}"
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        return f"it takes even head_dim up to {MAX_HEAD_DIM}, got {head_dim}"
    if heads > MAX_HEADS:
        return f"it takes up to {MAX_HEADS} heads, got {heads}"
    if rows > MAX_ROWS:
        return f"it takes up to {MAX_ROWS} rows, got {rows}"
    stride = next((step for step in keys.stride()[:2] if step * keys.element_size() % 16), None)
    if stride is not None and keys.dtype not in EIGHT_BITS:  # where scales decide where tokens begin
        return f"it takes rows and slots of keys that begin at multiples of 16 bytes, got a stride of {stride}"
    return failure(Kernel.SLIM, keys.device)
