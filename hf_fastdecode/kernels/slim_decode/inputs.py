"""Arguments of `slim_decode`, without Triton: RoPE tables, scales of keys in 8 bits, limits and checks."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from ..device import compute_capability
from ..failures import Kernel, failure
from ..limits import FLOATS, HALF_PRECISION, MAX_HEAD_DIM, check_numbers, check_table, refusal_of_any_shape

TURNS = 64
"""Positions in the table of rotations within a tile, whose largest size it is, of the kernel on clusters."""


class RotaryTables(NamedTuple):
    """RoPE of cached keys: "rotate half" over the first ``rotary_dim`` elements of a head.

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
    """Views of the scales in a cache of 8 bits, one per token and group of ``head_dim`` neighbouring elements.

    A cache holds each token's scales after its elements, in bf16. They are viewed as bytes, since they begin at odd
    addresses after an odd number of V-coordinates.

    Attributes:
        keys: ``[rows, slots, 2 * heads]`` uint8, with the strides of the keys.
        coordinates: ``[rows, slots, 2 * ceil(r / head_dim)]`` uint8, with the strides of the V-coordinates.
    """

    keys: Tensor
    coordinates: Tensor


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
        parts = {"keys": (self.keys, 16), "coordinates": (self.coordinates, 16)}
        of_scales = zip(("scales of keys", "scales of coordinates"), self.scales or ())
        return parts | {name: (part, 2) for name, part in of_scales}

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that RoPE rotates."""
        return 0 if self.rotary is None else 2 * self.rotary.cos.shape[-1]

    @property
    def table_row_stride(self) -> int:
        """Elements between the tables of two rows; 0 for tables of all rows."""
        return self.rotary.cos.stride(0) if self.rotary is not None and self.rotary.cos.shape[0] > 1 else 0

    def read_only(self, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Key offset, cosines and sines, with `unused` for those that were not given."""
        cos, sin = (unused, unused) if self.rotary is None else self.rotary[:2]
        return unused if self.key_offset is None else self.key_offset, cos, sin

    def parts(self, groups: int) -> tuple[Tensor, Tensor]:
        """Memory for the pieces: averages ``[pieces, heads, e + r]``, and base-2 log-sum-exp ``[pieces, heads]``."""
        pieces, heads = groups + self.query.shape[0] - 1, self.query.shape[1]
        width = self.keys.shape[2] + self.coordinates.shape[2]
        fp32: dict[str, Any] = {"dtype": torch.float32, "device": self.keys.device}
        return torch.empty(pieces, heads, width, **fp32), torch.empty(pieces, heads, **fp32)


def check_arguments(given: Arguments) -> None:
    """Raise ValueError against out-of-bounds accesses; contents of device tensors are not checked."""
    query, keys = given.query, given.keys
    if query.ndim != 4 or query.shape[2] != 1 or query.shape[3] % 2:
        raise ValueError(f"query must be [rows, heads, 1, head_dim] with an even head_dim, got {list(query.shape)}")
    if keys.dtype not in (*FLOATS, *EIGHT_BITS):
        raise ValueError(f"keys must be fp16, bf16, fp32, int8 or float8_e4m3fn, got {keys.dtype}")
    eight_bits = keys.dtype in EIGHT_BITS
    if query.dtype not in (torch.float32, torch.float32 if eight_bits else keys.dtype) or query.stride(3) != 1:
        raise ValueError(
            f"query must be float32{'' if eight_bits else f' or {keys.dtype}'}, contiguous in the last dimension, got "
            f"{query.dtype} with strides {query.stride()}"
        )
    rows, heads, _, head_dim = query.shape
    _check_cache(given, rows, heads * head_dim)
    _check_scales(keys, given.coordinates, head_dim, given.scales)
    check_table("lengths", given.lengths, (rows,), torch.int32)
    check_table("starts", given.starts, (rows,), torch.int32)
    check_table("key_offset", given.key_offset, (heads * head_dim,), torch.float32)
    if given.rotary is not None:
        _check_tables(given.rotary, rows, keys.shape[1], head_dim)
    check_numbers(given.scale)


def _check_cache(given: Arguments, rows: int, columns: int) -> None:
    keys = given.keys
    slots = keys.shape[1] if keys.ndim == 3 else -1
    for name, part, width in (("keys", keys, columns), ("coordinates", given.coordinates, -1)):
        wanted = width if width >= 0 else part.shape[-1]
        if part.shape != (rows, slots, wanted) or part.dtype != keys.dtype:
            shape = f"[{rows}, {slots}, {'r' if width < 0 else width}]"
            raise ValueError(f"{name} must be {shape} {keys.dtype}, got {list(part.shape)} {part.dtype}")
        if wanted and part.stride(2) != 1:
            raise ValueError(f"{name} must be contiguous in the last dimension, got strides {part.stride()}")
    if keys.dtype not in EIGHT_BITS:  # where scales decide where tokens begin
        check_alignment("keys", keys)


def _check_scales(keys: Tensor, coordinates: Tensor, head_dim: int, scales: Scales | None) -> None:
    """Check that scales belong to a cache, whose other shapes have been checked."""
    if keys.dtype not in EIGHT_BITS:
        if scales is not None:
            raise ValueError(f"scales are for keys in int8 and float8_e4m3fn, got {keys.dtype}; pass None")
        return
    if scales is None:
        raise ValueError(f"keys in {keys.dtype} need scales, got None; pass Scales, views after the elements")
    for name, part, given in (("keys", keys, scales.keys), ("coordinates", coordinates, scales.coordinates)):
        shape = (*part.shape[:2], SCALE_BYTES * -(-part.shape[2] // head_dim))
        if given.shape != shape or given.dtype != torch.uint8 or given.device != keys.device:
            wanted, found = (
                f"{list(shape)} uint8 on {keys.device}",
                f"{list(given.shape)} {given.dtype} on {given.device}",
            )
            raise ValueError(f"scales of {name} must be {wanted}, got {found}")
        if part.numel() and given.stride() != part.stride():
            raise ValueError(
                f"scales of {name} must have the strides of {name}, {part.stride()}, got {given.stride()}; view both "
                "in the tensor that holds them"
            )


def _check_tables(rotary: RotaryTables, rows: int, slots: int, head_dim: int) -> None:
    half = rotary.cos.shape[-1]
    if not 0 < half <= head_dim // 2:
        raise ValueError(f"rotary tables must have 1 to {head_dim // 2} columns, got {half}")
    check_table("turns", rotary.turns, (TURNS, 2, half), torch.float32)
    for name, table in zip(("cos", "sin"), rotary[:2]):
        check_table(name, table, (rows if table.shape[0] != 1 else 1, slots, half), torch.float32)
    if rotary.cos.shape != rotary.sin.shape:
        raise ValueError(f"cos and sin must have one shape, got {rotary.cos.shape} and {rotary.sin.shape}")


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
