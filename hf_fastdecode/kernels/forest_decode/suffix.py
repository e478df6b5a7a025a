# mypy: ignore-errors
"""The kernel of suffixes: each row's attention to its own tokens, to which it appends the new ones.

It then waits for the nodes' partials and merges them with its own, or leaves its own to be merged by another kernel:
then suffixes are attended to beside the nodes, by the multiprocessors that those leave free.
"""

import triton
import triton.language as tl

from .merge import near_pieces, take_depths
from .triton import LN2, LOG2E, LOWEST, aligned, cap_scores, factor_of, scores_of, see


@triton.jit
def _see_one(q, k, v, seen, top, total, acc, scale, soft_cap, BLOCK_N: tl.constexpr, SOFT_CAP: tl.constexpr):
    """As `see`, for one query ``[1, D]`` and without matrix units."""
    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[None, :] * scale
    if SOFT_CAP:
        scores = cap_scores(scores, soft_cap)
    scores = tl.where(seen[None, :], scores * LOG2E, -float("inf"))
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    added = tl.sum(tl.reshape(weights, [BLOCK_N])[:, None] * v.to(tl.float32), 0)
    return new_top, total * fade + tl.sum(weights, 1), acc * fade[:, None] + added[None, :]


@triton.jit
def attend_suffixes(
    query,  # [rows, heads, queries, head_dim]
    new_keys,  # [rows, kv_heads, queries, head_dim]
    new_values,
    suffix,  # [4] int64: addresses of keys and values [slots, kv_heads, capacity, head_dim], slot and head strides
    slots,  # [rows] int32: where a row's suffix is stored; -1 for a row that takes no part
    lengths,  # [rows] int32: tokens in a row's suffix before the new ones
    row_units,  # [depths, rows] int32, these and the following as in `Schedule`
    row_offsets,
    row_tiles,
    unit_slots,
    partial_out,  # of `node_partials`
    partial_lse,
    own_out,  # [rows, heads, queries, head_dim] fp32: the suffixes' partials
    own_lse,  # [rows, heads, queries] fp32, base 2
    out,  # [rows, heads, queries, head_dim]
    out_lse,  # [rows, heads, queries] fp32
    apart,  # [1] int32: with APART, whether to leave partials to be merged by the kernel that follows
    sinks,  # [heads] fp32: with SINKS, a score of each head that is of no key
    origins,  # [rows, origin_stride] int32: with ORIGINS, the slot that holds each token of a row's suffix
    rows,
    kv_heads,
    origin_stride,
    scale,
    soft_cap,
    window,  # with WINDOW, a query sees so many tokens, of which it is the last
    query_row_stride,
    query_head_stride,
    query_stride,
    new_key_row_stride,
    new_key_head_stride,
    new_key_stride,
    new_value_row_stride,
    new_value_head_stride,
    new_value_stride,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,  # packed queries of a row, padded for matrix units; 1 where one is multiplied without them
    TILE: tl.constexpr,  # packed queries of a row, padded to a power of two
    BLOCK_Q: tl.constexpr,  # new tokens, padded like BLOCK_P
    BLOCK_M: tl.constexpr,  # of node_partials
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,  # tiles in flight
    MERGE: tl.constexpr,  # partials of a query merged at once
    DEPTHS: tl.constexpr,  # levels of nodes
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    ORIGINS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
    APART: tl.constexpr,  # whether `merge_suffixes` follows
):
    leaves = tl.load(apart) != 0 if APART else False
    if APART and PDL:  # the kernel that follows waits for all of this
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) % kv_heads
    row = tl.program_id(0) // kv_heads
    element = query.dtype.element_ty
    each: tl.constexpr = GROUP * QUERIES
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    within = tl.arange(0, BLOCK_P)
    real = within < each
    position = within % QUERIES
    row64 = row.to(tl.int64)

    # What does not depend on other loads comes first: all of it is under way at once.
    slot = tl.load(slots + row)
    before = tl.load(lengths + row)
    slot_stride = tl.load(suffix + 2)
    base = (slot * slot_stride + head * tl.load(suffix + 3)) * (element.primitive_bitwidth // 8)
    suffix_keys = aligned(tl.load(suffix) + base, element)
    suffix_values = aligned(tl.load(suffix + 1) + base, element)
    where = row64 * query_row_stride + (head * GROUP + within // QUERIES) * query_head_stride + position * query_stride
    q = tl.load(query + where[:, None] + dims[None, :], mask=real[:, None] & in_dim[None, :], other=0.0)
    fresh = tl.arange(0, BLOCK_Q)
    key_at = row64 * new_key_row_stride + head * new_key_head_stride + fresh[:, None] * new_key_stride
    value_at = row64 * new_value_row_stride + head * new_value_head_stride + fresh[:, None] * new_value_stride
    kept = (fresh < QUERIES)[:, None] & in_dim[None, :]
    new_k = tl.load(new_keys + key_at + dims[None, :], mask=kept, other=0.0)
    new_v = tl.load(new_values + value_at + dims[None, :], mask=kept, other=0.0)
    took_part = slot >= 0
    if took_part == 0:
        before = 0

    factor = factor_of(scale, SOFT_CAP)
    top = tl.full([BLOCK_P], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_P], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + within // QUERIES, mask=real, other=0.0)
        top = tl.maximum(sink * LOG2E, LOWEST)  # the least number stands for no sink
        total += 1.0
    acc = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    MERGES: tl.constexpr = DEPTHS > 0
    THROUGH_MEMORY: tl.constexpr = APART or (MERGES and TILE != BLOCK_P)
    WIDTH: tl.constexpr = TILE if THROUGH_MEMORY else BLOCK_P
    index = tl.arange(0, WIDTH)
    mine = tl.where(took_part, index < each, False)
    if MERGES:
        first, count, row_in_tile, next_first, next_count, next_row_in_tile = near_pieces(
            row, head, index, mine, rows, row_units, row_offsets, row_tiles, unit_slots, BLOCK_M, DEPTHS
        )
    # Of the suffix, query j sees tokens from `oldest + j` on.
    oldest = tl.maximum(0, before + 1 - window) if WINDOW else 0
    for start in tl.range(oldest // BLOCK_N * BLOCK_N, before, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        seen = (token >= oldest) & (token < before) if WINDOW else token < before
        at = token[:, None] * HEAD_DIM + dims[None, :]
        if ORIGINS:  # relative to the row's own slot, whose address is the base
            origin = tl.load(origins + row64 * origin_stride + token, mask=seen, other=0)
            at += ((origin - slot) * slot_stride)[:, None]
        k = tl.load(suffix_keys + at, mask=seen[:, None] & in_dim[None, :], other=0.0)
        v = tl.load(suffix_values + at, mask=seen[:, None] & in_dim[None, :], other=0.0)
        if BLOCK_P == 1:  # one query: matrix units would compute fifteen rows of nothing
            top, total, acc = _see_one(q, k, v, seen, top, total, acc, scale, soft_cap, BLOCK_N, SOFT_CAP)
        else:
            scores = tl.where(seen[None, :], scores_of(q, k, scale, soft_cap, SOFT_CAP), -float("inf"))
            if WINDOW and QUERIES > 1:
                scores = tl.where(token[None, :] > (before + position - window)[:, None], scores, -float("inf"))
            top, total, acc = see(scores, factor, v, top, total, acc, element)

    # The new tokens go to the end of the suffix; their own keys and values are used from where they are.
    if BLOCK_P == 1:
        top, total, acc = _see_one(q, new_k, new_v, fresh < 1, top, total, acc, scale, soft_cap, 1, SOFT_CAP)
    else:
        scores = scores_of(q, new_k, scale, soft_cap, SOFT_CAP)
        scores = tl.where(fresh[None, :] <= position[:, None], scores, -float("inf"))
        if WINDOW and QUERIES > 1:
            scores = tl.where(fresh[None, :] > (position - window)[:, None], scores, -float("inf"))
        top, total, acc = see(scores, factor, new_v, top, total, acc, element)
    if took_part:
        place = (before + fresh)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(suffix_keys + place, new_k, mask=kept)
        tl.store(suffix_values + place, new_v, mask=kept)

    # From fractions of what was seen to the operator's result.
    first_query = (row64 * kv_heads + head) * each
    at = first_query + index
    kept = (index < each)[:, None] & in_dim[None, :]
    if THROUGH_MEMORY:  # which no other program touches: there the padding is left behind
        own_at = first_query + within
        tl.store(own_lse + own_at, top + tl.log2(total), mask=real)
        result = acc * (1.0 / total)[:, None]
        tl.store(own_out + own_at[:, None] * HEAD_DIM + dims[None, :], result, mask=real[:, None] & in_dim[None, :])
        if leaves:
            if PDL and tl.program_id(0) == tl.num_programs(0) - 1:  # who waits for this waits for the nodes too
                tl.extra.cuda.gdc_wait()
            return
        tl.debug_barrier()
        top = tl.load(own_lse + at, mask=index < each, other=0.0)
        total = tl.full([WIDTH], 1.0, tl.float32)
        acc = tl.load(own_out + at[:, None] * HEAD_DIM + dims[None, :], mask=kept, other=0.0)
    if MERGES:
        if PDL:  # the tables did not need the partials; what follows does
            tl.extra.cuda.gdc_wait()
            if not APART:
                tl.extra.cuda.gdc_launch_dependents()
        top, total, acc = take_depths(
            first,
            count,
            row_in_tile,
            next_first,
            next_count,
            next_row_in_tile,
            row,
            head,
            index,
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
    result = tl.where(took_part, acc * (1.0 / total)[:, None], 0.0)
    tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result.to(element), mask=kept)
    if LSE:
        lse = tl.where(took_part, (top + tl.log2(total)) * LN2, -float("inf"))
        tl.store(out_lse + at, lse, mask=index < each)
