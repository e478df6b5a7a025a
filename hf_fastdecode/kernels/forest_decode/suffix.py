# mypy: ignore-errors
"""Suffix kernel: appends the new tokens to each row's suffix, and attends to it.

It then waits for the node partials and merges them; or, where it runs beside the node kernel on the remaining
multiprocessors, it writes partials for the merge kernel.
"""

import triton
import triton.language as tl

from .merge import UNIT_TABLES, locate_depths, merge_depths
from .node_kernel import (
    LN2,
    LOG2E,
    LOWEST,
    aligned,
    base2_scale,
    cap_scores,
    distance_biases,
    online_softmax_step,
    qk_scores,
)


@triton.jit
def online_softmax_step_single_query(
    q, k, v, visible, state, scoring, head, age, BLOCK_N: tl.constexpr, SOFT_CAP: tl.constexpr, DISTANCES: tl.constexpr
):
    """`online_softmax_step` for one query ``[1, D]``, without tensor cores."""
    row_max, row_sum, acc = state
    scale, soft_cap, biases = scoring
    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[None, :] * scale
    if SOFT_CAP:
        scores = cap_scores(scores, soft_cap)
    if DISTANCES > 0:
        scores += distance_biases(biases, head, age, DISTANCES)[None, :]
    scores = tl.where(visible[None, :], scores * LOG2E, -float("inf"))
    new_row_max = tl.maximum(row_max, tl.max(scores, 1))
    weights = tl.exp2(scores - new_row_max[:, None])
    rescale = tl.exp2(row_max - new_row_max)
    added = tl.sum(tl.reshape(weights, [BLOCK_N])[:, None] * v.to(tl.float32), 0)
    return new_row_max, row_sum * rescale + tl.sum(weights, 1), acc * rescale[:, None] + added[None, :]


@triton.jit(
    # Values that differ from call to call, and tables that are read an element at a time.
    do_not_specialize=["rows", "block_m_log2", "origin_stride", "window"],
    do_not_specialize_on_alignment=["suffix", "slots", "lengths", *UNIT_TABLES, "overlap_suffix"],
)
def attend_suffixes(
    query,  # [rows, heads, queries, head_dim + rest]
    new_keys,  # [rows, kv_heads, queries, head_dim]
    new_values,
    suffix,  # [4] int64: addresses of keys and values [slots, kv_heads, capacity, head_dim], slot and head strides
    slots,  # [rows] int32: slot of a row's suffix; -1 for an inactive row
    lengths,  # [rows] int32: tokens in a row's suffix before this step; with DIVIDED [3, rows]: those stored here, and
    # the first new token that is, and the first after it that is not
    row_units,  # [depths, rows] int32; this and the next three as in `Schedule`
    row_offsets,
    row_tiles,
    unit_slots,
    partial_out,  # workspace of `node_partials`
    partial_lse,
    own_out,  # [rows, heads, queries, head_dim] fp32: the suffixes' partials
    own_lse,  # [rows, heads, queries] fp32, base 2
    out,  # [rows, heads, queries, head_dim]
    out_lse,  # [rows, heads, queries] fp32
    overlap_suffix,  # [1] int32: with OVERLAP_SUFFIX, whether `merge_rows` merges
    sinks,  # [heads] fp32: with SINKS, one more score per head, without a value
    biases,  # [heads, DISTANCES] fp32, as for `node_partials`
    origins,  # [rows, origin_stride] int32: with ORIGINS, the slot that holds each token of a row's suffix
    rows,
    kv_heads,
    block_m_log2,  # of `node_partials`
    origin_stride,
    scale,
    soft_cap,
    window,  # with WINDOW, a query sees the last `window` tokens up to its position
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
    REST: tl.constexpr,  # as in `node_partials`
    BLOCK_R: tl.constexpr,
    BLOCK_P: tl.constexpr,  # packed queries of a row, padded for tensor cores; 1 for a single query without them
    TILE: tl.constexpr,  # packed queries of a row, padded to a power of two
    BLOCK_Q: tl.constexpr,  # new tokens, padded like BLOCK_P
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,  # tiles in flight
    MERGE: tl.constexpr,  # partials of a query loaded at once
    DEPTHS: tl.constexpr,  # levels of nodes
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    DISTANCES: tl.constexpr,
    SINKS: tl.constexpr,
    DIVIDED: tl.constexpr,  # whether suffixes are divided between devices: this one may have no key of a row
    ORIGINS: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
    OVERLAP_SUFFIX: tl.constexpr,  # whether `merge_rows` is launched too
):
    defer_merge = tl.load(overlap_suffix) != 0 if OVERLAP_SUFFIX else False
    if OVERLAP_SUFFIX and PDL:  # the merge kernel waits for the whole of this one
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0) % kv_heads
    row = tl.program_id(0) // kv_heads
    element = query.dtype.element_ty
    queries_per_kv_head: tl.constexpr = GROUP * QUERIES
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    rest = tl.arange(0, BLOCK_R)
    in_rest = rest < REST
    within = tl.arange(0, BLOCK_P)
    valid_query = within < queries_per_kv_head
    position = within % QUERIES
    row64 = row.to(tl.int64)

    # Independent loads first, so that all are in flight at once.
    slot = tl.load(slots + row)
    before = tl.load(lengths + row)
    if DIVIDED:
        first_new = tl.load(lengths + rows + row)
        stop_new = tl.load(lengths + 2 * rows + row)
    slot_stride = tl.load(suffix + 2)
    base = (slot * slot_stride + head * tl.load(suffix + 3)) * (element.primitive_bitwidth // 8)
    suffix_keys = aligned(tl.load(suffix) + base, element)
    rest_stride = slot_stride // HEAD_DIM * REST
    if REST:  # the same for all KV heads
        base = slot * rest_stride * (element.primitive_bitwidth // 8)
    suffix_values = aligned(tl.load(suffix + 1) + base, element)
    query_at = (
        row64 * query_row_stride + (head * GROUP + within // QUERIES) * query_head_stride + position * query_stride
    )
    q = tl.load(query + query_at[:, None] + dims[None, :], mask=valid_query[:, None] & in_dim[None, :], other=0.0)
    q_rest = q
    if REST:
        has_rest = valid_query[:, None] & in_rest[None, :]
        q_rest = tl.load(query + query_at[:, None] + HEAD_DIM + rest[None, :], mask=has_rest, other=0.0)
    new_token = tl.arange(0, BLOCK_Q)
    key_at = row64 * new_key_row_stride + head * new_key_head_stride + new_token[:, None] * new_key_stride
    value_at = row64 * new_value_row_stride + head * new_value_head_stride + new_token[:, None] * new_value_stride
    is_new = new_token < QUERIES
    if DIVIDED:
        is_new = is_new & (new_token >= first_new) & (new_token < stop_new)
    kept = is_new[:, None] & in_dim[None, :]
    new_k = tl.load(new_keys + key_at + dims[None, :], mask=kept, other=0.0)
    if REST:
        kept_rest = is_new[:, None] & in_rest[None, :]
        new_v = tl.load(new_values + value_at + rest[None, :], mask=kept_rest, other=0.0)
    else:
        new_v = tl.load(new_values + value_at + dims[None, :], mask=kept, other=0.0)
    active = slot >= 0
    if active == 0:
        before = 0

    scale_log2 = base2_scale(scale, SOFT_CAP)
    scoring = (scale, soft_cap, biases)
    row_max = tl.full([BLOCK_P], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_P], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head * GROUP + within // QUERIES, mask=valid_query, other=0.0)
        row_max = tl.maximum(sink * LOG2E, LOWEST)  # fp32's lowest means no sink
        row_sum += 1.0
    acc = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    HAS_NODES: tl.constexpr = DEPTHS > 0
    # Without the layout of matrix products, and the padding of BLOCK_P, partials are merged as they are loaded.
    THROUGH_MEMORY: tl.constexpr = OVERLAP_SUFFIX or (HAS_NODES and BLOCK_P > 1)
    WIDTH: tl.constexpr = TILE if THROUGH_MEMORY else BLOCK_P
    index = tl.arange(0, WIDTH)
    active_query = tl.where(active, index < queries_per_kv_head, False)
    if HAS_NODES:
        tables = (row_units, row_offsets, row_tiles, unit_slots, rows, block_m_log2)
        # All queries of a row are in one query tile where their number divides that of the smallest tile.
        SCALAR: tl.constexpr = queries_per_kv_head == TILE and TILE <= 16
        if SCALAR:
            located = locate_depths(row, head, 0, active, tables, DEPTHS, True)
        else:
            located = locate_depths(row, head, index, active_query, tables, DEPTHS, False)
    query_head = head * GROUP + within // QUERIES
    # Query j sees the suffix from token `oldest + j` on.
    oldest = tl.maximum(0, before + 1 - window) if WINDOW else 0
    for start in tl.range(oldest // BLOCK_N * BLOCK_N, before, BLOCK_N, num_stages=STAGES):
        token = start + tl.arange(0, BLOCK_N)
        visible = (token >= oldest) & (token < before) if WINDOW else token < before
        at = token[:, None] * HEAD_DIM + dims[None, :]
        if ORIGINS:  # offset from the row's slot, which the addresses point at
            origin = tl.load(origins + row64 * origin_stride + token, mask=visible, other=0)
            at += ((origin - slot) * slot_stride)[:, None]
        k = tl.load(suffix_keys + at, mask=visible[:, None] & in_dim[None, :], other=0.0)
        if REST:
            at = token[:, None] * REST + rest[None, :]
            if ORIGINS:
                at += ((origin - slot) * rest_stride)[:, None]
            v = tl.load(suffix_values + at, mask=visible[:, None] & in_rest[None, :], other=0.0)
        else:
            v = tl.load(suffix_values + at, mask=visible[:, None] & in_dim[None, :], other=0.0)
        if BLOCK_P == 1:  # one query: tensor cores would compute 15 padding rows
            age = before - token
            state = (row_max, row_sum, acc)
            row_max, row_sum, acc = online_softmax_step_single_query(
                q, k, v, visible, state, scoring, head, age, BLOCK_N, SOFT_CAP, DISTANCES
            )
        else:
            scores = qk_scores(q, k, scale, soft_cap, SOFT_CAP, q_rest, v, REST)
            if DISTANCES > 0:
                age = (before + position)[:, None] - token[None, :]
                scores += distance_biases(biases, query_head[:, None], age, DISTANCES) / scale
            scores = tl.where(visible[None, :], scores, -float("inf"))
            if REST:
                v = k
            if WINDOW and QUERIES > 1:
                scores = tl.where(token[None, :] > (before + position - window)[:, None], scores, -float("inf"))
            row_max, row_sum, acc = online_softmax_step(scores, scale_log2, v, row_max, row_sum, acc, element)

    # Attend to the new tokens in registers, and append them to the suffix.
    if BLOCK_P == 1:
        state = (row_max, row_sum, acc)
        row_max, row_sum, acc = online_softmax_step_single_query(
            q, new_k, new_v, is_new, state, scoring, head, -new_token, 1, SOFT_CAP, DISTANCES
        )
    else:
        scores = qk_scores(q, new_k, scale, soft_cap, SOFT_CAP, q_rest, new_v, REST)
        if DISTANCES > 0:
            age = position[:, None] - new_token[None, :]
            scores += distance_biases(biases, query_head[:, None], age, DISTANCES) / scale
        scores = tl.where(new_token[None, :] <= position[:, None], scores, -float("inf"))
        if DIVIDED:
            scores = tl.where(is_new[None, :], scores, -float("inf"))
        if WINDOW and QUERIES > 1:
            scores = tl.where(new_token[None, :] > (position - window)[:, None], scores, -float("inf"))
        opened = new_k if REST else new_v
        row_max, row_sum, acc = online_softmax_step(scores, scale_log2, opened, row_max, row_sum, acc, element)
    if DIVIDED:
        before -= first_new
    if active:
        offsets = (before + new_token)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(suffix_keys + offsets, new_k, mask=kept)
        if REST:
            offsets = (before + new_token)[:, None] * REST + rest[None, :]
            tl.store(suffix_values + offsets, new_v, mask=kept_rest)
        else:
            tl.store(suffix_values + offsets, new_v, mask=kept)

    # Normalise, merge the node partials, and store.
    first_query = (row64 * kv_heads + head) * queries_per_kv_head
    at = first_query + index
    kept = (index < queries_per_kv_head)[:, None] & in_dim[None, :]
    if THROUGH_MEMORY:  # memory of this program alone
        own_at = first_query + within
        if DIVIDED:
            row_sum = tl.where(row_sum > 0, row_sum, 1.0)  # of no key, whose row max is LOWEST
        tl.store(own_lse + own_at, row_max + tl.log2(row_sum), mask=valid_query)
        result = acc * (1.0 / row_sum)[:, None]
        tl.store(
            own_out + own_at[:, None] * HEAD_DIM + dims[None, :], result, mask=valid_query[:, None] & in_dim[None, :]
        )
        if defer_merge:
            if PDL and tl.program_id(0) == tl.num_programs(0) - 1:  # dependents also rely on the nodes
                tl.extra.cuda.gdc_wait()
            return
        tl.debug_barrier()
        row_max = tl.load(own_lse + at, mask=index < queries_per_kv_head, other=0.0)
        row_sum = tl.full([WIDTH], 1.0, tl.float32)
        if DIVIDED:
            row_sum = tl.where(row_max > LOWEST, 1.0, 0.0)
        acc = tl.load(own_out + at[:, None] * HEAD_DIM + dims[None, :], mask=kept, other=0.0)
    if HAS_NODES:
        if PDL:  # from here on the node partials are read
            tl.extra.cuda.gdc_wait()
            if not OVERLAP_SUFFIX:
                tl.extra.cuda.gdc_launch_dependents()
        partials, state = (partial_out, partial_lse), (row_max, row_sum, acc)
        queries = index if SCALAR else 0
        row_max, row_sum, acc = merge_depths(
            located, queries, block_m_log2, partials, state, HEAD_DIM, BLOCK_D, MERGE, DEPTHS, SCALAR
        )
    found = active
    if DIVIDED:
        found = (row_sum > 0) & active
        row_sum = tl.where(found, row_sum, 1.0)
    result = tl.where(active, acc * (1.0 / row_sum)[:, None], 0.0)
    tl.store(out + at[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), mask=kept)
    if LSE:
        lse = tl.where(found, (row_max + tl.log2(row_sum)) * LN2, -float("inf"))
        tl.store(out_lse + at, lse, mask=index < queries_per_kv_head)
