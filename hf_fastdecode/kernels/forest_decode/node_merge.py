# mypy: ignore-errors
"""Merge of the node partials alone, for attention without suffixes and for merging across devices."""

import triton
import triton.language as tl

from .merge import locate_first_depths, locate_rows, merge_depths
from .node_kernel import LN2, LOWEST


@triton.jit
def merge_nodes(
    slots,  # arguments as in `attend_suffixes`
    row_units,
    row_offsets,
    row_tiles,
    unit_slots,
    partial_out,
    partial_lse,
    out,  # [rows, heads, queries, head_dim] fp32
    out_lse,  # [rows, heads, queries] fp32, natural logarithm
    rows,
    kv_heads,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MERGE: tl.constexpr,
    DEPTHS: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,  # rows per program
):
    """Merge the node partials alone, into the partial of all keys of a row's nodes: ``(0, -inf)`` without any."""
    head, row, within, valid_query, active = locate_rows(slots, rows, kv_heads, GROUP * QUERIES, TILE, ROWS)
    active_query = valid_query & active
    dims = tl.arange(0, BLOCK_D)
    first, count, row_in_tile, next_first, next_count, next_row_in_tile = locate_first_depths(
        row, head, within, active_query, rows, row_units, row_offsets, row_tiles, unit_slots, BLOCK_M, DEPTHS
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row_max = tl.full([ROWS * TILE], LOWEST, tl.float32)
    row_sum = tl.zeros([ROWS * TILE], tl.float32)
    acc = tl.zeros([ROWS * TILE, BLOCK_D], tl.float32)
    row_max, row_sum, acc = merge_depths(
        first,
        count,
        row_in_tile,
        next_first,
        next_count,
        next_row_in_tile,
        row,
        head,
        within,
        active_query,
        rows,
        row_units,
        row_offsets,
        row_tiles,
        unit_slots,
        partial_out,
        partial_lse,
        row_max,
        row_sum,
        acc,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        MERGE,
        DEPTHS,
    )
    at = (row.to(tl.int64) * kv_heads + head) * (GROUP * QUERIES) + within
    place = at[:, None] * HEAD_DIM + dims[None, :]
    kept = valid_query[:, None] & (dims < HEAD_DIM)[None, :]
    result = tl.where((row_sum > 0)[:, None], acc * (1.0 / row_sum)[:, None], 0.0)
    tl.store(out + place, result, mask=kept)
    tl.store(out_lse + at, (row_max + tl.log2(row_sum)) * LN2, mask=valid_query)
