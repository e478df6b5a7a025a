# mypy: ignore-errors
"""Merging of partials, in the order of the schedule: the same input and shape give the same bits."""

import triton
import triton.language as tl


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
    """Take queries' partials into their running maximum (base 2), sum and mean: ``[P]``, ``[P]``, ``[P, D]``."""
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
            new_top = tl.maximum(top, lse)
            fade = tl.exp2(top - new_top)
            weight = tl.exp2(lse - new_top)
            total = total * fade + weight
            acc = acc * fade[:, None] + part * weight[:, None]
            top = new_top
    return top, total, acc
