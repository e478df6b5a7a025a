# mypy: ignore-errors
"""Merge of the pieces of a row, in order, so that results are bitwise reproducible."""

import triton
import triton.language as tl

from ..forest_decode.node_kernel import LN2, LOWEST
from .partials import row_tiles, share_start


@triton.jit
def merge_pieces(
    part_out,  # arguments as in the kernels that wrote them, with the same tiles and groups
    part_lse,
    starts,
    lengths,
    out_keys,  # [rows, heads, e] fp32
    out_coordinates,  # [rows, heads, r] fp32
    out_lse,  # [rows, heads] fp32, natural logarithm
    rows,
    groups,
    HEADS: tl.constexpr,
    KEYS: tl.constexpr,  # e
    RANK: tl.constexpr,
    STARTS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # columns per program
    MERGE: tl.constexpr,  # pieces loaded at once
    WIDE: tl.constexpr,  # tiles times groups may exceed 31 bits; divisions of 64 bits take most of the time
):
    row = tl.program_id(0) // HEADS
    head = tl.program_id(0) % HEADS
    block = tl.program_id(1)
    tiles, tile_starts = row_tiles(starts, lengths, rows, BLOCK_T, BLOCK_ROWS, STARTS)
    total = tl.sum(tiles, 0)
    all_rows = tl.arange(0, BLOCK_ROWS)
    begin = tl.sum(tl.where(all_rows == row, tile_starts, 0), 0)
    if WIDE:
        begin = begin.to(tl.int64)
    end = begin + tl.sum(tl.where(all_rows == row, tiles, 0), 0)
    # The last group that starts at or before a tile has it.
    some = tl.maximum(total, 1)
    first = ((begin + 1) * groups - 1) // some
    count = tl.where(end > begin, (end * groups - 1) // some - first + 1, 0).to(tl.int32)
    first = first.to(tl.int32)

    KEY_BLOCKS: tl.constexpr = (KEYS + BLOCK - 1) // BLOCK
    of_keys = block < KEY_BLOCKS
    column = tl.where(of_keys, block, block - KEY_BLOCKS) * BLOCK + tl.arange(0, BLOCK)
    kept = column < tl.where(of_keys, KEYS, RANK)
    row_max = tl.full([1], LOWEST, tl.float32)
    row_sum = tl.zeros([1], tl.float32)
    acc = tl.zeros([BLOCK], tl.float32)
    for start in range(0, count, MERGE):
        for index in tl.static_range(MERGE):  # independent loads
            group = first + start + index
            # A group without a tile, of more groups than tiles, has written no piece.
            stop = share_start(group + 1, total, groups, WIDE)
            has = (start + index < count) & (share_start(group, total, groups, WIDE) < stop)
            piece = tl.cast(group + row, tl.int64) * HEADS + head
            lse = tl.load(part_lse + piece + tl.arange(0, 1), mask=has, other=-float("inf"))
            at = piece * (KEYS + RANK) + tl.where(of_keys, 0, KEYS) + column
            part = tl.load(part_out + at, mask=kept & has, other=0.0)
            new_row_max = tl.maximum(row_max, lse)
            rescale = tl.exp2(row_max - new_row_max)
            weight = tl.exp2(lse - new_row_max)
            acc = acc * rescale + part * weight
            row_sum = row_sum * rescale + weight
            row_max = new_row_max
    result = acc * (1.0 / tl.where(row_sum > 0, row_sum, 1.0))
    at = (row * HEADS + head).to(tl.int64)
    if of_keys:
        tl.store(out_keys + at * KEYS + column, result, mask=kept)
    else:
        tl.store(out_coordinates + at * RANK + column, result, mask=kept)
    if block == 0:
        lse = tl.where(row_sum > 0, (row_max + tl.log2(tl.where(row_sum > 0, row_sum, 1.0))) * LN2, -float("inf"))
        tl.store(out_lse + at + tl.arange(0, 1), lse)
