# mypy: ignore-errors
"""Merging of partials, in the order of the schedule: the same input and shape give the same bits."""

import triton
import triton.language as tl

from .triton import LN2


@triton.jit
def pieces_of(
    row, head, within, real, depth, rows, row_units, row_offsets, row_tiles, unit_slots, BLOCK_M: tl.constexpr
):
    """Where the partials of queries lie: the first slot, how many follow, and the query's row in each.

    ``within`` are the queries' places among the packed queries of their row and KV head; those that are not ``real``
    have no partials.
    """
    unit = tl.load(row_units + depth * rows + row)
    tiles = tl.load(row_tiles + depth * rows + row)
    offset = tl.load(row_offsets + depth * rows + row)
    own = unit + head * tiles + (offset + within) // BLOCK_M - offset // BLOCK_M
    has = tl.where(unit >= 0, real, False)
    first = tl.load(unit_slots + own, mask=has, other=0)
    count = tl.load(unit_slots + own + 1, mask=has, other=0) - first
    return first, count, (offset + within) % BLOCK_M


@triton.jit
def near_pieces(
    row,
    head,
    within,
    real,
    rows,
    row_units,
    row_offsets,
    row_tiles,
    unit_slots,
    BLOCK_M: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """`pieces_of` the first two depths, for `take_depths`: asked for before the partials are there."""
    first, count, row_in_tile = pieces_of(
        row, head, within, real, 0, rows, row_units, row_offsets, row_tiles, unit_slots, BLOCK_M
    )
    if DEPTHS == 1:
        return first, count, row_in_tile, first, count, row_in_tile
    next_first, next_count, next_row_in_tile = pieces_of(
        row, head, within, real, 1, rows, row_units, row_offsets, row_tiles, unit_slots, BLOCK_M
    )
    return first, count, row_in_tile, next_first, next_count, next_row_in_tile


@triton.jit
def take_part(lse, part, top, total, acc):
    """Take a partial (base 2) of queries into their running maximum, sum and mean: ``[P]``, ``[P]``, ``[P, D]``."""
    new_top = tl.maximum(top, lse)
    fade = tl.exp2(top - new_top)
    weight = tl.exp2(lse - new_top)
    return new_top, total * fade + weight, acc * fade[:, None] + part * weight[:, None]


@triton.jit
def take_pieces(
    first,
    count,
    row_in_tile,
    partial_out,
    partial_lse,
    top,
    total,
    acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MERGE: tl.constexpr,
):
    """`take_part` of one depth's pieces, in their order."""
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    for start in range(0, tl.max(count, 0), MERGE):
        for index in tl.static_range(MERGE):  # loads that do not wait for each other
            here = start + index < count
            at = (first + start + index).to(tl.int64) * BLOCK_M + row_in_tile
            lse = tl.load(partial_lse + at, mask=here, other=-float("inf"))
            part = tl.load(
                partial_out + at[:, None] * HEAD_DIM + dims[None, :], mask=here[:, None] & in_dim[None, :], other=0.0
            )
            top, total, acc = take_part(lse, part, top, total, acc)
    return top, total, acc


@triton.jit
def take_depths(
    first,  # these six of `near_pieces`
    count,
    row_in_tile,
    next_first,
    next_count,
    next_row_in_tile,
    row,  # these and the tables as there
    head,
    within,
    real,
    rows,
    row_units,
    row_offsets,
    row_tiles,
    unit_slots,
    partial_out,
    partial_lse,
    top,
    total,
    acc,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    MERGE: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """`take_pieces` of all depths, in their order."""
    for depth in tl.static_range(DEPTHS):
        if depth == 1:
            first, count, row_in_tile = next_first, next_count, next_row_in_tile
        if depth > 1:
            first, count, row_in_tile = pieces_of(
                row, head, within, real, depth, rows, row_units, row_offsets, row_tiles, unit_slots, BLOCK_M
            )
        top, total, acc = take_pieces(
            first, count, row_in_tile, partial_out, partial_lse, top, total, acc, HEAD_DIM, BLOCK_D, BLOCK_M, MERGE
        )
    return top, total, acc


@triton.jit
def merge_suffixes(
    slots,  # these as those of `attend_suffixes`, which left its partials here
    row_units,
    row_offsets,
    row_tiles,
    unit_slots,
    partial_out,
    partial_lse,
    own_out,
    own_lse,
    out,
    out_lse,
    apart,
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
    LSE: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,  # of a program
):
    if tl.load(apart) == 0:  # they are merged
        if PDL:  # who waits for this waits for them too
            tl.extra.cuda.gdc_wait()
        return
    head = tl.program_id(0) % kv_heads
    each: tl.constexpr = GROUP * QUERIES
    packed = tl.arange(0, ROWS * TILE)
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    row = tl.program_id(0) // kv_heads * ROWS + packed // TILE
    within = packed % TILE
    real = (row < rows) & (within < each)
    row = tl.minimum(row, rows - 1)
    took_part = tl.load(slots + row) >= 0
    mine = real & took_part
    first, count, row_in_tile, next_first, next_count, next_row_in_tile = near_pieces(
        row, head, within, mine, rows, row_units, row_offsets, row_tiles, unit_slots, BLOCK_M, DEPTHS
    )
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = (row.to(tl.int64) * kv_heads + head) * each + within
    place = at[:, None] * HEAD_DIM + dims[None, :]
    kept = real[:, None] & in_dim[None, :]
    top = tl.load(own_lse + at, mask=real, other=0.0)
    total = tl.full([ROWS * TILE], 1.0, tl.float32)
    acc = tl.load(own_out + place, mask=kept, other=0.0)
    top, total, acc = take_depths(
        first,
        count,
        row_in_tile,
        next_first,
        next_count,
        next_row_in_tile,
        row,
        head,
        within,
        mine,
        rows,
        row_units,
        row_offsets,
        row_tiles,
        unit_slots,
        partial_out,
        partial_lse,
        top,
        total,
        acc,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_M,
        MERGE,
        DEPTHS,
    )
    result = tl.where(took_part[:, None], acc * (1.0 / total)[:, None], 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=kept)
    if LSE:
        lse = tl.where(took_part, (top + tl.log2(total)) * LN2, -float("inf"))
        tl.store(out_lse + at, lse, mask=real)
