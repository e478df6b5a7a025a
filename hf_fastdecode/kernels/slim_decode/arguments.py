"""Arguments of `slim_decode`, and their checks."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..forest_decode.limits import check_table
from .inputs import EIGHT_BITS, TURNS, RotaryTables, Scales, check_scales


class Arguments(NamedTuple):
    """Tensors and options of one call, as `slim_decode` documents them."""

    query: Tensor
    keys: Tensor
    coordinates: Tensor
    lengths: Tensor
    scale: float
    key_offset: Tensor | None
    rotary: RotaryTables | None
    starts: Tensor | None
    scales: Scales | None = None

    @property
    def first_slots(self) -> Tensor:
        """Starts, or any table of this type where kernels do not read them."""
        return self.lengths if self.starts is None else self.starts

    @property
    def copied(self) -> dict[str, tuple[Tensor, int]]:
        """Parts that the kernel on clusters reads, and the bytes that it reads at once."""
        scales = () if self.scales is None else self.scales
        of_scales = zip(("scales of keys", "scales of coordinates"), scales)
        return {"keys": (self.keys, 16), "coordinates": (self.coordinates, 16)} | {
            name: (part, 2) for name, part in of_scales
        }

    @property
    def rotary_dim(self) -> int:
        """Numbers of a head that RoPE rotates."""
        return 0 if self.rotary is None else 2 * self.rotary.cos.shape[-1]

    @property
    def table_row_stride(self) -> int:
        """Numbers between the tables of two rows; 0 for tables of all rows."""
        return self.rotary.cos.stride(0) if self.rotary is not None and self.rotary.cos.shape[0] > 1 else 0

    def read_only(self, unused: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Keys, V-coordinates, key offset, cosines and sines, with `unused` for those that were not given."""
        cos, sin = (unused, unused) if self.rotary is None else self.rotary[:2]
        return self.keys, self.coordinates, unused if self.key_offset is None else self.key_offset, cos, sin

    def parts(self, groups: int) -> tuple[Tensor, Tensor]:
        """Memory for the pieces: averages ``[pieces, heads, e + r]``, and base-2 log-sum-exp ``[pieces, heads]``."""
        pieces, heads = groups + self.query.shape[0] - 1, self.query.shape[1]
        width = self.keys.shape[2] + self.coordinates.shape[2]
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": self.keys.device}
        return torch.empty(pieces, heads, width, **fp32), torch.empty(pieces, heads, **fp32)


def check_arguments(given: Arguments) -> None:
    """Raise ValueError against out-of-bounds accesses; contents of device tensors are not checked."""
    query, keys, coordinates, lengths, scale, key_offset, rotary, starts, scales = given
    if query.ndim != 4 or query.shape[2] != 1 or query.shape[3] % 2:
        raise ValueError(f"query must be [rows, heads, 1, head_dim] with an even head_dim, got {list(query.shape)}")
    rows, heads, _, head_dim = query.shape
    if keys.dtype not in (torch.float16, torch.bfloat16, torch.float32, *EIGHT_BITS):
        raise ValueError(f"keys must be fp16, bf16, fp32, int8 or float8_e4m3fn, got {keys.dtype}")
    eight_bits = keys.dtype in EIGHT_BITS
    if query.dtype not in (torch.float32, torch.float32 if eight_bits else keys.dtype) or query.stride(3) != 1:
        raise ValueError(
            f"query must be float32{'' if eight_bits else f' or {keys.dtype}'}, contiguous in the last dimension, got "
            f"{query.dtype} with strides {query.stride()}"
        )
    slots = keys.shape[1] if keys.ndim == 3 else -1
    for name, part, width in (("keys", keys, heads * head_dim), ("coordinates", coordinates, -1)):
        wanted = width if width >= 0 else part.shape[-1]
        if part.shape != (rows, slots, wanted) or part.dtype != keys.dtype:
            raise ValueError(
                f"{name} must be [{rows}, {slots}, {'r' if width < 0 else width}] {keys.dtype}, got "
                f"{list(part.shape)} {part.dtype}"
            )
        if wanted and part.stride(2) != 1:
            raise ValueError(f"{name} must be contiguous in the last dimension, got strides {part.stride()}")
    if not eight_bits:  # where scales decide where tokens begin
        check_alignment("keys", keys)
    check_scales(keys, coordinates, head_dim, scales)
    check_table("lengths", lengths, (rows,), torch.int32)
    if starts is not None:
        check_table("starts", starts, (rows,), torch.int32)
    if key_offset is not None:
        check_table("key_offset", key_offset, (heads * head_dim,), torch.float32)
    if rotary is not None:
        half = rotary[0].shape[-1]
        if not 0 < half <= head_dim // 2:
            raise ValueError(f"rotary tables must have 1 to {head_dim // 2} columns, got {half}")
        if rotary.turns is not None:
            check_table("turns", rotary.turns, (TURNS, 2, half), torch.float32)
        for name, table in zip(("cos", "sin"), rotary[:2]):
            of_rows = rows if table.shape[0] != 1 else 1
            check_table(name, table, (of_rows, slots, half), torch.float32)
        if rotary[0].shape != rotary[1].shape:
            raise ValueError(f"cos and sin must have one shape, got {rotary[0].shape} and {rotary[1].shape}")
    if not scale > 0:
        raise ValueError(f"scale must be above 0, got {scale}")


def is_aligned(part: Tensor, unit: int = 16) -> bool:
    """Whether rows and slots of a part of the cache can be read `unit` bytes at a time."""
    starts = part.data_ptr(), *(stride * part.element_size() for stride in part.stride()[:2])
    return not part.numel() or not any(start % unit for start in starts)


def check_alignment(name: str, part: Tensor, unit: int = 16) -> None:
    """Raise ValueError where rows or slots of a part of the cache cannot be read `unit` bytes at a time."""
    if not is_aligned(part, unit):
        raise ValueError(
            f"rows and slots of {name} must begin at multiples of {unit} bytes, got strides {part.stride()}"
        )
