# mypy: ignore-errors
"""Rotates the query of one token per row, and stores its key, less the offset, and V-coordinates in a slim cache."""

import triton
import triton.language as tl

from ..pointwise.kernel import rotate_heads

WHOLE = tl.constexpr(1)  # of RotaryForm: only the sum is rounded


@triton.jit
def append_token(
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
    BLOCK_D: tl.constexpr,  # at least ROTARY / 2
    BLOCK_REST: tl.constexpr,  # at least HEAD_DIM - ROTARY
    BLOCK: tl.constexpr,  # elements that a program stores
):
    KEYS: tl.constexpr = HEADS * HEAD_DIM
    QUERY_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    KEY_BLOCKS: tl.constexpr = (KEYS + BLOCK - 1) // BLOCK
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if block < QUERY_BLOCKS:
        rotate_heads(
            query + row * KEYS,
            rotated + row * KEYS,
            cos + row * table_row_stride,
            sin + row * table_row_stride,
            block * BLOCK_H + tl.arange(0, BLOCK_H),
            HEAD_DIM,
            HEADS,
            HEAD_DIM,
            ROTARY,
            False,
            WHOLE,
            BLOCK_D,
            BLOCK_REST,
        )
    elif block < QUERY_BLOCKS + KEY_BLOCKS:
        column = (block - QUERY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        kept = column < KEYS
        numbers = tl.load(keys + row * KEYS + column, mask=kept, other=0.0)
        numbers -= tl.load(key_offset + column, mask=kept, other=0.0)
        at = stored_keys + row * key_row_stride + tl.load(slots + row) * key_stride
        tl.store(at + column, numbers.to(stored_keys.dtype.element_ty), mask=kept)
    else:
        column = (block - QUERY_BLOCKS - KEY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
        kept = column < RANK
        numbers = tl.load(coordinates + row * RANK + column, mask=kept, other=0.0)
        at = stored_coordinates + row * coordinate_row_stride + tl.load(slots + row) * coordinate_stride
        tl.store(at + column, numbers.to(stored_coordinates.dtype.element_ty), mask=kept)
