# mypy: ignore-errors
"""Prefill kernel: attention of many tokens, each over intervals of the keys, with a soft cap where there is one.

Causal attention, a sliding window, runs of tokens side by side and a context before them differ in the intervals
alone. The query heads of a KV head are packed next to each other, token by token, so that a tile covers few positions:
under a window it then reads little more than the window. Key tiles that no query of a tile sees are skipped, and those
that all of them see need no mask.
"""

import triton
import triton.language as tl

from ..forest_decode.node_kernel import LN2, LOG2E, LOWEST, cap_scores, online_softmax_step

FARTHEST = tl.constexpr(2147483647)


@triton.jit
def tanh(x, IN_HARDWARE: tl.constexpr):
    """tanh by the GPU's instruction, whose error of 2^-11 is that of a rounding to fp16; else in fp32."""
    if IN_HARDWARE:
        return tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return cap_scores(x, 1.0)


@triton.jit
def tile_scores(q, k, factor, SOFT_CAP: tl.constexpr, IN_HARDWARE: tl.constexpr):
    """Raw products; with a soft cap their capped share of it, from -1 to 1."""
    raw = tl.dot(q, tl.trans(k))
    return tanh(raw * factor, IN_HARDWARE) if SOFT_CAP else raw


@triton.jit(
    # Values that differ from pass to pass.
    do_not_specialize=["count", "kv_heads", "lse_head_stride"],
    do_not_specialize_on_alignment=["intervals", "sinks"],
)
def attend_intervals(
    query,  # [heads, tokens, head_dim], as `out`, `earlier_out` and, without the last dimension, `earlier_lse`
    keys,  # [kv_heads, length, head_dim]
    values,
    intervals,  # [1 + 2 * SPANS, count] int32: a token, the first and the last key that it sees of each span
    out,  # in the query's dtype; only with FINAL
    earlier_out,  # fp32: the partial of other keys, and where the merged one goes without FINAL
    earlier_lse,  # with FINAL, where the merged one goes with LSE
    sinks,  # [heads] fp32; only with SINKS
    count,
    kv_heads,
    scale,
    soft_cap,
    query_head_stride,
    query_stride,
    key_head_stride,
    key_stride,
    value_head_stride,
    value_stride,
    out_head_stride,
    out_stride,
    earlier_head_stride,
    earlier_stride,
    lse_head_stride,
    lse_stride,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    EARLIER: tl.constexpr,  # whether there is a partial to merge with
    FINAL: tl.constexpr,  # whether these are the last keys
    LSE: tl.constexpr,  # whether the log-sum-exp is kept
    SPANS: tl.constexpr,
    IN_HARDWARE: tl.constexpr,
):
    element: tl.constexpr = query.dtype.element_ty
    head = tl.program_id(0) % kv_heads
    # The last tokens of a long run see most keys: their tiles start first.
    tile = tl.num_programs(0) // kv_heads - 1 - tl.program_id(0) // kv_heads
    packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    in_tile = packed < count * GROUP
    index = packed // GROUP
    query_head = head * GROUP + packed % GROUP
    token = tl.load(intervals + index, mask=in_tile, other=0).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    kept = in_tile[:, None] & in_dim[None, :]
    query_at = query_head.to(tl.int64) * query_head_stride + token * query_stride
    q = tl.load(query + query_at[:, None] + dims[None, :], mask=kept, other=0.0)

    factor = scale / soft_cap if SOFT_CAP else 1.0
    scale_log2 = (soft_cap if SOFT_CAP else scale) * LOG2E
    earlier_at = query_head.to(tl.int64) * earlier_head_stride + token * earlier_stride
    lse_at = query_head.to(tl.int64) * lse_head_stride + token * lse_stride
    if EARLIER:
        row_max = tl.load(earlier_lse + lse_at, mask=in_tile, other=-float("inf")) * LOG2E
        some = row_max > LOWEST  # without keys, `earlier_out` is undefined
        acc = tl.load(
            earlier_out + earlier_at[:, None] + dims[None, :], mask=some[:, None] & in_dim[None, :], other=0.0
        )
        row_sum = tl.where(some, 1.0, 0.0)
        row_max = tl.maximum(row_max, LOWEST)
    else:
        row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    here = tl.arange(0, BLOCK_N)
    keys_at = here[:, None] * key_stride + dims[None, :]
    values_at = here[:, None] * value_stride + dims[None, :]
    key_step = (tl.full([], BLOCK_N, tl.int64)) * key_stride
    value_step = (tl.full([], BLOCK_N, tl.int64)) * value_stride
    for span in tl.static_range(SPANS):
        first_seen = tl.load(intervals + (2 * span + 1) * count + index, mask=in_tile, other=0)
        last_seen = tl.load(intervals + (2 * span + 2) * count + index, mask=in_tile, other=-1)
        last_seen = tl.where(last_seen >= first_seen, last_seen, -1)
        stop = tl.max(last_seen, 0) + 1
        first = tl.minimum(tl.min(tl.where(last_seen >= 0, first_seen, FARTHEST), 0), stop)
        tiles = tl.cdiv(stop - first, BLOCK_N)
        # Key tiles [before, after) need no mask.
        last_first = tl.max(tl.where(last_seen >= 0, first_seen, 0), 0)
        before = tl.minimum(tl.cdiv(last_first - first, BLOCK_N), tiles)
        seen_by_all = tl.min(tl.where(in_tile, last_seen, FARTHEST), 0) + 1 - first
        after = tl.maximum(before, tl.minimum(tl.maximum(seen_by_all, 0) // BLOCK_N, tiles))

        span_keys = keys + head.to(tl.int64) * key_head_stride + first.to(tl.int64) * key_stride
        span_values = values + head.to(tl.int64) * value_head_stride + first.to(tl.int64) * value_stride
        for key_tile in tl.range(before, after, num_stages=STAGES):
            if HEAD_DIM == BLOCK_D:
                k = tl.load(span_keys + key_tile * key_step + keys_at)
                v = tl.load(span_values + key_tile * value_step + values_at)
            else:
                k = tl.load(span_keys + key_tile * key_step + keys_at, mask=in_dim[None, :], other=0.0)
                v = tl.load(span_values + key_tile * value_step + values_at, mask=in_dim[None, :], other=0.0)
            scores = tile_scores(q, k, factor, SOFT_CAP, IN_HARDWARE)
            row_max, row_sum, acc = online_softmax_step(scores, scale_log2, v, row_max, row_sum, acc, element)
        for masked in tl.range(0, tiles - (after - before), num_stages=STAGES):
            key_tile = tl.where(masked < before, masked, masked + (after - before))
            key = first + key_tile * BLOCK_N + here
            stored = (key < stop)[:, None] & in_dim[None, :]
            k = tl.load(span_keys + key_tile * key_step + keys_at, mask=stored, other=0.0)
            v = tl.load(span_values + key_tile * value_step + values_at, mask=stored, other=0.0)
            scores = tile_scores(q, k, factor, SOFT_CAP, IN_HARDWARE)
            visible = (key[None, :] >= first_seen[:, None]) & (key[None, :] <= last_seen[:, None])
            scores = tl.where(visible, scores, -float("inf"))
            row_max, row_sum, acc = online_softmax_step(scores, scale_log2, v, row_max, row_sum, acc, element)

    if SINKS:
        sink = tl.load(sinks + query_head, mask=in_tile, other=0.0) * LOG2E
        new_row_max = tl.maximum(row_max, sink)
        rescale = tl.exp2(row_max - new_row_max)
        row_sum = row_sum * rescale + tl.exp2(sink - new_row_max)
        row_max = new_row_max
        acc = acc * rescale[:, None]
    has_keys = row_sum > 0
    row_sum = tl.where(has_keys, row_sum, 1.0)
    result = acc * (1.0 / row_sum)[:, None]
    if FINAL:
        out_at = query_head.to(tl.int64) * out_head_stride + token * out_stride
        tl.store(out + out_at[:, None] + dims[None, :], result.to(element), mask=kept)
    else:
        tl.store(earlier_out + earlier_at[:, None] + dims[None, :], result, mask=kept)
    if LSE:
        lse = tl.where(has_keys, (row_max + tl.log2(row_sum)) * LN2, -float("inf"))
        tl.store(earlier_lse + lse_at, lse, mask=in_tile)
