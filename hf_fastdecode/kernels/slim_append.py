# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""`append_token`: the work between a slim layer's projections and `slim_decode` in a captured step, in one launch.

The query of one token per row is rotated, and its key, less the offset, and V-coordinates are stored in a slim cache.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ahead import launch
from .failures import Kernel, launching
from .limits import are_contiguous, refused
from .pointwise.kernel import rotate_heads

_HEADS = 8  # of a program that rotates
_ELEMENTS = 1024  # of a program that stores


def append_token(
    query: Tensor,
    keys: Tensor,
    coordinates: Tensor,
    key_offset: Tensor,
    tables: tuple[Tensor, Tensor],
    slots: Tensor,
    stored: tuple[Tensor, Tensor],
) -> Tensor:
    """Rotate the query of each row, and store its key and V-coordinates.

    Args:
        query: ``[rows, heads, head_dim]``, contiguous, in any floating dtype.
        keys: ``[rows, heads * head_dim]`` fp32, contiguous, before RoPE.
        coordinates: ``[rows, r]`` fp32, contiguous; r may be 0.
        key_offset: ``[heads * head_dim]`` fp32, which cached keys leave out.
        tables: cos and sin of the rows' positions, ``[rows or 1, rotary]`` fp32, contiguous: RoPE by halves of a
            head's first elements ("rotate half").
        slots: ``[rows]`` int64: where each row's token is stored.
        stored: Cached keys ``[rows, slots, heads * head_dim]`` and V-coordinates ``[rows, slots, r]``, fp32, fp16 or
            bf16, the last dimension contiguous.

    Returns:
        Rotated queries ``[rows, heads, head_dim]`` in fp32.
    """
    rows, heads, head_dim = query.shape
    rank, rotary = coordinates.shape[-1], tables[0].shape[-1]
    shapes = keys.shape == (rows, heads * head_dim) and coordinates.shape == (rows, rank) and slots.shape == (rows,)
    shapes = shapes and tables[0].shape == tables[1].shape and len(tables[0]) in (1, rows) and 0 < rotary <= head_dim
    shapes = shapes and rotary % 2 == 0 and key_offset.shape == (heads * head_dim,)
    caches = all(
        part.shape == (rows, stored[0].shape[1], width) and part.stride(-1) == 1
        for part, width in zip(stored, (heads * head_dim, rank), strict=True)
        if width
    )
    given = (query, keys, coordinates, key_offset, *tables, slots)
    if not (shapes and caches and are_contiguous(*given)):
        takes = "append_token takes contiguous tensors of one token per row, as documented"
        raise refused(takes, *given, *stored)
    rotated = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    columns, stored_coordinates = heads * head_dim, stored[1] if rank else stored[0]
    with launching(Kernel.APPEND, query.device):
        launch(
            _append,
            (rows, triton.cdiv(heads, _HEADS) + triton.cdiv(columns, _ELEMENTS) + triton.cdiv(rank, _ELEMENTS)),
            *(query, keys, coordinates if rank else keys, key_offset, *tables, slots, rotated),
            *(stored[0], stored_coordinates, rotary if len(tables[0]) > 1 else 0),
            *(*stored[0].stride()[:2], *stored[1].stride()[:2]),
            HEADS=heads,
            HEAD_DIM=head_dim,
            ROTARY=rotary,
            RANK=rank,
            BLOCK_H=_HEADS,
            BLOCK=_ELEMENTS,
        )
    return rotated


WHOLE = tl.constexpr(1)  # of RotaryForm: only the sum is rounded


@triton.jit
def _append(
    query,  # [rows, HEADS, HEAD_DIM], contiguous
    keys,  # [rows, HEADS * HEAD_DIM] fp32, contiguous
    coordinates,  # [rows, RANK] fp32, contiguous
    key_offset,  # [HEADS * HEAD_DIM] fp32
    cos,  # [rows or 1, ROTARY] fp32, contiguous
    sin,  # likewise
    slots,  # [rows] int64: where each row's token is stored
    rotated,  # as query, fp32
    stored_keys,  # [rows, slots, HEADS * HEAD_DIM], the last dimension contiguous
    stored_coordinates,  # [rows, slots, RANK], likewise
    table_row_stride,
    key_row_stride,
    key_stride,
    coordinate_row_stride,
    coordinate_stride,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_H: tl.constexpr,  # heads of a program
    BLOCK: tl.constexpr,  # elements that a program stores
):
    KEYS: tl.constexpr = HEADS * HEAD_DIM
    QUERY_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KEY_BLOCKS: tl.constexpr = (KEYS + BLOCK - 1) // BLOCK
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if block < QUERY_BLOCKS:
        table = row * table_row_stride
        parts = (query + row * KEYS, rotated + row * KEYS, cos + table, sin + table)
        heads = (block * BLOCK_H + tl.arange(0, BLOCK_H), HEAD_DIM)
        rotate_heads(parts, heads, HEADS, HEAD_DIM, ROTARY, False, WHOLE)
    elif block < QUERY_BLOCKS + KEY_BLOCKS:
        column = (block - QUERY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        kept = column < KEYS
        values = tl.load(keys + row * KEYS + column, mask=kept, other=0.0)
        values -= tl.load(key_offset + column, mask=kept, other=0.0)
        at = stored_keys + row * key_row_stride + tl.load(slots + row) * key_stride
        tl.store(at + column, values.to(stored_keys.dtype.element_ty), mask=kept)
    else:
        column = (block - QUERY_BLOCKS - KEY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        kept = column < RANK
        values = tl.load(coordinates + row * RANK + column, mask=kept, other=0.0)
        at = stored_coordinates + row * coordinate_row_stride + tl.load(slots + row) * coordinate_stride
        tl.store(at + column, values.to(stored_coordinates.dtype.element_ty), mask=kept)
