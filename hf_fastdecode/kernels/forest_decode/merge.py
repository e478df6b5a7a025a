# mypy: ignore-errors
"""Merges of partials: of a row's nodes and suffix, and of several devices (Tree Attention, section 5).

The order is fixed, that of the schedule or of the devices, so that results are bitwise reproducible.
"""

import triton
import triton.language as tl
from torch import Tensor

from ..ahead import launch
from ..failures import Kernel, launching
from .node_kernel import LN2, LOG2E, LOWEST

UNIT_TABLES = ("row_units", "row_offsets", "row_tiles", "unit_slots")


@triton.jit
def locate_pieces(row, head, within, valid_query, depth, tables):
    """Locate the partials of queries at one depth: first slot, number of pieces, and row in the query tile.

    ``within`` are the queries' indices among the packed queries of their row and KV head; queries that are not valid
    have no pieces.
    """
    row_units, row_offsets, row_tiles, unit_slots, rows, block_m_log2 = tables
    at = depth * rows + row
    unit = tl.load(row_units + at)
    tiles = tl.load(row_tiles + at)
    offset = tl.load(row_offsets + at)
    own = unit + head * tiles + ((offset + within) >> block_m_log2) - (offset >> block_m_log2)
    has = tl.where(unit >= 0, valid_query, False)
    first = tl.load(unit_slots + own, mask=has, other=0)
    count = tl.load(unit_slots + own + 1, mask=has, other=0) - first
    return first, count, (offset + within) & ((1 << block_m_log2) - 1)


@triton.jit
def locate_depths(row, head, within, valid_query, tables, DEPTHS: tl.constexpr, SCALAR: tl.constexpr):
    """`locate_pieces` of all depths, loaded before the partials are ready; for `merge_depths`.

    Returns:
        For each depth, the first slot, the number of pieces and the row in the query tile. With `SCALAR`, pieces are
        numbered through: slots are less the pieces of the depths above, indices include these.
    """
    firsts, ends, rows_in_tile = (), (), ()
    for depth in tl.static_range(DEPTHS):
        first, count, row_in_tile = locate_pieces(row, head, within, valid_query, depth, tables)
        if SCALAR and depth > 0:
            first -= ends[depth - 1]
            count += ends[depth - 1]
        firsts += (first,)
        ends += (count,)
        rows_in_tile += (row_in_tile,)
    return firsts, ends, rows_in_tile


@triton.jit
def merge_partial(lse, part, row_max, row_sum, acc):
    """Merge a partial (base 2) into row max ``[P]``, row sum ``[P]`` and accumulator ``[P, D]``."""
    new_row_max = tl.maximum(row_max, lse)
    rescale = tl.exp2(row_max - new_row_max)
    weight = tl.exp2(lse - new_row_max)
    return new_row_max, row_sum * rescale + weight, acc * rescale[:, None] + part * weight[:, None]


@triton.jit
def merge_depths(
    located,  # from `locate_depths`
    queries,  # with SCALAR, how far each query is after the located one in its tile; else 0
    block_m_log2,
    partials,  # their outs and log-sum-exps
    state,  # row max, row sum and accumulator
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MERGE: tl.constexpr,
    DEPTHS: tl.constexpr,
    SCALAR: tl.constexpr,  # whether one query was located for all, else each was
):
    """Merge the pieces of all depths, in order.

    With SCALAR in one loop for all depths, else in a loop for each. In a second loop, Triton exchanges row vectors
    between threads for each partial, and barriers keep its loads from overlapping. But where each query has another
    location, Triton 3.6 and 3.7 do not compile every form of the one loop.
    """
    firsts, ends, rows_in_tile = located
    partial_out, partial_lse = partials
    row_max, row_sum, acc = state
    TOGETHER: tl.constexpr = DEPTHS if SCALAR else 1
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    for top in tl.static_range(0, DEPTHS, TOGETHER):
        total = ends[top + TOGETHER - 1]
        for start in range(0, total if SCALAR else tl.max(total, 0), MERGE):
            for index in tl.static_range(MERGE):  # independent loads
                piece = start + index
                slot, row_in_tile = firsts[top] + piece, rows_in_tile[top]
                for depth in tl.static_range(top + 1, top + TOGETHER):
                    below = piece >= ends[depth - 1]
                    slot = tl.where(below, firsts[depth] + piece, slot)
                    row_in_tile = tl.where(below, rows_in_tile[depth], row_in_tile)
                here = piece < total
                at = (slot.to(tl.int64) << block_m_log2) + row_in_tile + queries
                lse = tl.load(partial_lse + at, mask=here, other=-float("inf"))
                kept = here & in_dim[None, :] if SCALAR else here[:, None] & in_dim[None, :]
                part = tl.load(partial_out + at[:, None] * HEAD_DIM + dims[None, :], mask=kept, other=0.0)
                row_max, row_sum, acc = merge_partial(lse, part, row_max, row_sum, acc)
    return row_max, row_sum, acc


@triton.jit
def locate_rows(slots, rows, kv_heads, queries_per_kv_head: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr):
    """KV head, rows and packed queries of a program that merges `ROWS` rows; which are valid, and which active."""
    head = tl.program_id(0) % kv_heads
    packed = tl.arange(0, ROWS * TILE)
    row = tl.program_id(0) // kv_heads * ROWS + packed // TILE
    within = packed % TILE
    valid_query = (row < rows) & (within < queries_per_kv_head)
    row = tl.minimum(row, rows - 1)
    return head, row, within, valid_query, tl.load(slots + row) >= 0


@triton.jit(
    do_not_specialize=["rows", "block_m_log2"],
    do_not_specialize_on_alignment=["slots", *UNIT_TABLES, "overlap_suffix"],
)
def merge_rows(
    slots,  # arguments as in `attend_suffixes`, which wrote own_out and own_lse; without OWN, these are not read
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
    overlap_suffix,
    rows,
    kv_heads,
    block_m_log2,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    MERGE: tl.constexpr,
    DEPTHS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
    ROWS: tl.constexpr,  # rows per program
    OWN: tl.constexpr,  # whether to merge the suffixes' partials too; without, rows without nodes get (0, -inf)
    DIVIDED: tl.constexpr,  # with OWN, whether these may be empty
    OTHER: tl.constexpr,  # with OWN, whether it is a partial of other code: with a natural logarithm, in any dtype
):
    merged = tl.load(overlap_suffix) == 0 if OWN and not OTHER else False  # by the suffix kernel
    if merged:
        if PDL:  # dependents also rely on earlier kernels, so wait even without work
            tl.extra.cuda.gdc_wait()
        return
    queries_per_kv_head: tl.constexpr = GROUP * QUERIES
    head, row, within, valid_query, active = locate_rows(slots, rows, kv_heads, queries_per_kv_head, TILE, ROWS)
    active_query = valid_query & active
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    tables = (row_units, row_offsets, row_tiles, unit_slots, rows, block_m_log2)
    located = locate_depths(row, head, within, active_query, tables, DEPTHS, False)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    at = (row.to(tl.int64) * kv_heads + head) * queries_per_kv_head + within
    place = at[:, None] * HEAD_DIM + dims[None, :]
    kept = valid_query[:, None] & in_dim[None, :]
    if OWN:
        row_max = tl.load(own_lse + at, mask=valid_query, other=0.0)
        row_sum = tl.full([ROWS * TILE], 1.0, tl.float32)
        if OTHER:
            row_max = tl.maximum(row_max * LOG2E, LOWEST)
        if DIVIDED or OTHER:
            row_sum = tl.where(row_max > LOWEST, 1.0, 0.0)
        acc = tl.load(own_out + place, mask=kept, other=0.0).to(tl.float32)
    else:
        row_max = tl.full([ROWS * TILE], LOWEST, tl.float32)
        row_sum = tl.zeros([ROWS * TILE], tl.float32)
        acc = tl.zeros([ROWS * TILE, BLOCK_D], tl.float32)
    partials, state = (partial_out, partial_lse), (row_max, row_sum, acc)
    row_max, row_sum, acc = merge_depths(
        located, 0, block_m_log2, partials, state, HEAD_DIM, BLOCK_D, MERGE, DEPTHS, False
    )
    if OWN and (DIVIDED or OTHER):
        has_keys = active & (row_sum > 0)
    else:
        has_keys = active if OWN else row_sum > 0
    result = tl.where(has_keys[:, None], acc * (1.0 / tl.where(has_keys, row_sum, 1.0))[:, None], 0.0)
    tl.store(out + place, result.to(out.dtype.element_ty), mask=kept)
    if LSE:
        lse = tl.where(has_keys, (row_max + tl.log2(row_sum)) * LN2, -float("inf"))
        tl.store(out_lse + at, lse, mask=valid_query)


_QUERIES = 4
"""Queries of a program: few, so that a step of one row fills the multiprocessors."""


def merge_ranks(gathered: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge partials into `out` and `lse`; an empty part has weight 0, and the union of empty ones is ``(0, -inf)``.

    Args:
        gathered: ``[ranks, elements]`` fp32, contiguous: each rank's ``out``, then its log-sum-exp, both contiguous.
        out: ``[..., head_dim]``, contiguous.
        lse: ``[...]`` fp32, contiguous.
    """
    ranks, elements = gathered.shape
    queries, width = lse.numel(), out.shape[-1]
    if elements != queries * (width + 1):
        raise ValueError(f"{queries} queries of {width} elements give {queries * (width + 1)} a rank, got {elements}")
    if not queries:
        return
    with launching(Kernel.MERGE, gathered.device):
        launch(
            _merge_ranks,
            (triton.cdiv(queries, _QUERIES),),
            gathered,
            out,
            lse,
            queries,
            ranks,
            WIDTH=width,
            BLOCK_D=triton.next_power_of_2(width),
            QUERIES=_QUERIES,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["queries", "ranks"])
def _merge_ranks(
    gathered, out, lse, queries, ranks, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr
):
    queries = queries.to(tl.int64)  # of many rows and ranks there are more than 2^31 elements
    query = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    column = tl.arange(0, BLOCK_D)
    inside = query < queries
    valid = inside[:, None] & (column < WIDTH)[None, :]
    at = query[:, None] * WIDTH + column[None, :]
    numbers = queries * (WIDTH + 1)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    for rank in range(ranks):
        of_rank = tl.load(gathered + rank * numbers + queries * WIDTH + query, mask=inside, other=float("-inf"))
        largest = tl.maximum(largest, of_rank)
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - (-inf) would be nan
    total = tl.zeros((QUERIES,), tl.float32)
    mean = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    for rank in range(ranks):
        part = gathered + rank * numbers
        of_rank = tl.load(part + queries * WIDTH + query, mask=inside, other=float("-inf"))
        weight = tl.exp(of_rank - shift)
        total += weight
        mean += weight[:, None] * tl.load(part + at, mask=valid, other=0.0)
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(out + at, (mean / divisor[:, None]).to(out.dtype.element_ty), mask=valid)
    tl.store(lse + query, tl.where(total > 0, shift + tl.log(divisor), float("-inf")), mask=inside)
