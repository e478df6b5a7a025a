"""The two kernels of forest decoding.

`node_partials` is a stream-K kernel (LeanAttention, section 4): the key tiles of all nodes, heads and query tiles are
laid end to end and cut into equal shares for a fixed grid. The queries of all rows of a node, and of a group of query
heads, fill the rows of a tensor-core tile, so that a key tile is read once for all of them. Every piece leaves an fp32
partial in the workspace.

`suffix_and_merge` attends each row to its own suffix, appends the new tokens' keys and values on the way, and merges
the row's partials in the order of the schedule, which makes the result the same bits for the same shapes.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _soft_cap(scores, cap):
    """``cap * tanh(scores / cap)``: near 0 by its series, where the logistic function would lose digits."""
    x = scores / cap
    far = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    y = x * x
    tail = 62.0 / 2835.0 - y * (1382.0 / 155925.0)
    near = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0 - y * tail))))
    return cap * tl.where(y < 0.16, near, far)


@triton.jit
def _see(scores, values, top, total, acc, element: tl.constexpr):
    """Online softmax: take scores (base 2) ``[M, N]`` and values ``[N, D]`` into the running maximum, sum and mean."""
    new_top = tl.maximum(top, tl.max(scores, 1))
    weights = tl.exp2(scores - new_top[:, None])
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(element), values, acc * fade[:, None])
    return new_top, total, acc


@triton.jit
def _scores(query, keys, factor, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """Scores in base 2: ``factor`` is ``scale * log2(e)``."""
    raw = tl.dot(query, tl.trans(keys))
    if SOFT_CAP:
        return _soft_cap(raw * scale, soft_cap) * LOG2E
    return raw * factor


@triton.jit
def node_partials(
    query,  # [rows, heads, queries, head_dim]
    nodes,  # [3, node_capacity] int64: addresses of a node's keys, of its values, elements between its KV heads
    pieces,  # [pieces, 16] int32, see `schedule.PIECE`; row i is program i's first
    partial_out,  # [pieces, BLOCK_M, head_dim] fp32
    partial_lse,  # [pieces, BLOCK_M] fp32, natural log
    node_capacity,
    scale,
    soft_cap,
    query_row_stride,
    query_head_stride,
    query_stride,
    GROUP: tl.constexpr,  # query heads of a KV head
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    each: tl.constexpr = GROUP * QUERIES
    element = query.dtype.element_ty
    factor = scale * LOG2E
    piece = tl.program_id(0)
    if PDL:
        # Dependents may start once every program is here; they read what earlier kernels wrote, so those must be done.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if tl.load(pieces + piece * 16) < 0:  # the grid is wider than the work
        return
    while piece >= 0:
        # Everything but the addresses stands in the piece's own row: fewer loads wait for each other.
        entry = pieces + piece * 16
        node = tl.load(entry)
        head = tl.load(entry + 1)
        tile = tl.load(entry + 2)
        first = tl.load(entry + 3)
        last = tl.load(entry + 4)
        length = tl.load(entry + 5)
        row_start = tl.load(entry + 6)
        row_count = tl.load(entry + 7)
        slot = tl.load(entry + 8)
        piece = tl.load(entry + 9)
        stride = tl.load(nodes + 2 * node_capacity + node)
        keys = tl.cast(tl.load(nodes + node), tl.pointer_type(element)) + head * stride
        values = tl.cast(tl.load(nodes + node_capacity + node), tl.pointer_type(element)) + head * stride
        keys = tl.multiple_of(keys, 16)
        values = tl.multiple_of(values, 16)

        # Packed query i belongs to row i // each; its head and position within the row are i % each.
        packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row = row_start + packed // each
        within = packed % each
        where = (
            row.to(tl.int64) * query_row_stride
            + (head * GROUP + within // QUERIES) * query_head_stride
            + (within % QUERIES) * query_stride
        )
        in_tile = packed < row_count * each
        q = tl.load(query + where[:, None] + dims[None, :], mask=in_tile[:, None] & in_dim[None, :], other=0.0)

        top = tl.full([BLOCK_M], -float("inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        whole = tl.minimum(last, length // BLOCK_N)  # tiles before this one need no mask
        tile_at = tl.arange(0, BLOCK_N)[:, None] * HEAD_DIM + dims[None, :]
        step = tl.full([], BLOCK_N * HEAD_DIM, tl.int64)  # a node may hold more numbers than 32 bits count
        for key_tile in tl.range(first, whole, num_stages=STAGES):
            if HEAD_DIM == BLOCK_D:
                k = tl.load(keys + key_tile * step + tile_at)
                v = tl.load(values + key_tile * step + tile_at)
            else:
                k = tl.load(keys + key_tile * step + tile_at, mask=in_dim[None, :], other=0.0)
                v = tl.load(values + key_tile * step + tile_at, mask=in_dim[None, :], other=0.0)
            scores = _scores(q, k, factor, scale, soft_cap, SOFT_CAP)
            top, total, acc = _see(scores, v, top, total, acc, element)
        if whole < last:
            seen = whole * BLOCK_N + tl.arange(0, BLOCK_N) < length
            k = tl.load(keys + whole * step + tile_at, mask=seen[:, None] & in_dim[None, :], other=0.0)
            v = tl.load(values + whole * step + tile_at, mask=seen[:, None] & in_dim[None, :], other=0.0)
            scores = _scores(q, k, factor, scale, soft_cap, SOFT_CAP)
            top, total, acc = _see(tl.where(seen[None, :], scores, -float("inf")), v, top, total, acc, element)

        at_row = slot * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        tl.store(partial_lse + at_row, (top + tl.log2(total)) * LN2)
        result = acc / total[:, None]
        tl.store(partial_out + at_row[:, None] * HEAD_DIM + dims[None, :], result, mask=in_dim[None, :])


@triton.jit
def suffix_and_merge(
    query,  # [rows, heads, queries, head_dim]
    new_keys,  # [rows, kv_heads, queries, head_dim]
    new_values,
    suffix,  # [4] int64: addresses of keys and values [slots, kv_heads, capacity, head_dim], slot and head strides
    slots,  # [rows] int32: where a row's suffix is stored; -1 for a row that takes no part
    lengths,  # [rows] int32: tokens in a row's suffix before the new ones
    row_units,  # [depths, rows] int32: the unit of KV head 0 that holds the row's first query, or -1
    row_offsets,  # [depths, rows] int32: the row's first query within its node's packed queries
    row_tiles,  # [depths, rows] int32: query tiles of the row's node
    unit_slots,  # [units + 1] int32: the partials of each unit (node, KV head, query tile)
    partial_out,
    partial_lse,
    out,  # [rows, heads, queries, head_dim]
    out_lse,  # [rows, heads, queries] fp32
    rows,
    kv_heads,
    scale,
    soft_cap,
    query_row_stride,
    query_head_stride,
    query_stride,
    new_row_stride,
    new_head_stride,
    new_stride,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,  # packed queries of a row, padded
    BLOCK_M: tl.constexpr,  # of node_partials
    BLOCK_N: tl.constexpr,
    MERGE: tl.constexpr,  # partials merged at once
    DEPTHS: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0) % kv_heads
    row = tl.program_id(0) // kv_heads
    element = query.dtype.element_ty
    each: tl.constexpr = GROUP * QUERIES
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    within = tl.arange(0, BLOCK_P)
    real = within < each
    position = within % QUERIES
    query_head = head * GROUP + within // QUERIES
    row64 = row.to(tl.int64)
    destination = (row64 * kv_heads * GROUP + query_head) * QUERIES + position
    slot = tl.load(slots + row)
    if slot < 0:
        nothing = tl.zeros([BLOCK_P, BLOCK_D], element)
        tl.store(out + destination[:, None] * HEAD_DIM + dims[None, :], nothing, mask=real[:, None] & in_dim[None, :])
        if LSE:
            tl.store(out_lse + destination, tl.full([BLOCK_P], -float("inf"), tl.float32), mask=real)
        return
    where = row64 * query_row_stride + query_head * query_head_stride + position * query_stride
    q = tl.load(query + where[:, None] + dims[None, :], mask=real[:, None] & in_dim[None, :], other=0.0)
    before = tl.load(lengths + row)

    # The new tokens go to the end of the suffix; their own keys and values are used from where they are.
    top = tl.full([BLOCK_P], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_P], tl.float32)
    acc = tl.zeros([BLOCK_P, BLOCK_D], tl.float32)
    base = slot * tl.load(suffix + 2) + head * tl.load(suffix + 3)
    suffix_keys = tl.multiple_of(tl.cast(tl.load(suffix), tl.pointer_type(element)) + base, 16)
    suffix_values = tl.multiple_of(tl.cast(tl.load(suffix + 1), tl.pointer_type(element)) + base, 16)
    fresh = row64 * new_row_stride + head * new_head_stride
    for index in tl.static_range(QUERIES):
        new_key = tl.load(new_keys + fresh + index * new_stride + dims, mask=in_dim, other=0.0)
        new_value = tl.load(new_values + fresh + index * new_stride + dims, mask=in_dim, other=0.0)
        place = (before + index).to(tl.int64) * HEAD_DIM + dims
        tl.store(suffix_keys + place, new_key, mask=in_dim)
        tl.store(suffix_values + place, new_value, mask=in_dim)
        score = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        if SOFT_CAP:
            score = _soft_cap(score, soft_cap)
        score = tl.where(position >= index, score * LOG2E, -float("inf"))
        new_top = tl.maximum(top, score)
        weight = tl.where(position >= index, tl.exp2(score - new_top), 0.0)
        fade = tl.where(top > -float("inf"), tl.exp2(top - new_top), 0.0)
        total = total * fade + weight
        acc = acc * fade[:, None] + weight[:, None] * new_value.to(tl.float32)[None, :]
        top = new_top

    for start in range(0, before, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        seen = token < before
        at = token.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
        k = tl.load(suffix_keys + at, mask=seen[:, None] & in_dim[None, :], other=0.0)
        v = tl.load(suffix_values + at, mask=seen[:, None] & in_dim[None, :], other=0.0)
        if BLOCK_P == 1:  # one query: matrix units would compute fifteen rows of nothing
            scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), 1)[None, :] * scale
            if SOFT_CAP:
                scores = _soft_cap(scores, soft_cap)
            scores = tl.where(seen[None, :], scores * LOG2E, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - new_top[:, None])
            fade = tl.exp2(top - new_top)
            total = total * fade + tl.sum(weights, 1)
            added = tl.sum(tl.reshape(weights, [BLOCK_N])[:, None] * v.to(tl.float32), 0)
            acc = acc * fade[:, None] + added[None, :]
            top = new_top
        else:
            scores = _scores(q, k, scale * LOG2E, scale, soft_cap, SOFT_CAP)
            top, total, acc = _see(tl.where(seen[None, :], scores, -float("inf")), v, top, total, acc, element)

    if PDL:  # the suffix did not need the partials; what follows does
        tl.extra.cuda.gdc_wait()
    # From here on `acc` is the sum over what was seen, weighted against the running maximum `top`. Queries are taken
    # one by one, and of each many partials at once: loads that do not wait for each other.
    slots = tl.arange(0, MERGE)
    for depth in tl.static_range(DEPTHS):
        unit = tl.load(row_units + depth * rows + row)
        if unit >= 0:
            tiles = tl.load(row_tiles + depth * rows + row)
            offset = tl.load(row_offsets + depth * rows + row)
            for turn in range(each):
                own = unit + head * tiles + (offset + turn) // BLOCK_M - offset // BLOCK_M
                row_in_tile = (offset + turn) % BLOCK_M
                last = tl.load(unit_slots + own + 1)
                mine = within == turn
                for first in range(tl.load(unit_slots + own), last, MERGE):
                    at = (first + slots) * BLOCK_M + row_in_tile
                    filled = first + slots < last
                    lse = tl.load(partial_lse + at, mask=filled, other=-float("inf")) * LOG2E
                    parts = tl.load(
                        partial_out + at.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :],
                        mask=filled[:, None] & in_dim[None, :],
                        other=0.0,
                    )
                    part_top = tl.max(lse, 0)
                    weights = tl.exp2(lse - part_top)
                    part = tl.sum(parts * weights[:, None], 0)
                    new_top = tl.where(mine, tl.maximum(top, part_top), top)
                    fade = tl.exp2(top - new_top)
                    weight = tl.where(mine, tl.exp2(part_top - new_top), 0.0)
                    total = total * fade + weight * tl.sum(weights, 0)
                    acc = acc * fade[:, None] + weight[:, None] * part[None, :]
                    top = new_top

    result = acc / total[:, None]
    tl.store(
        out + destination[:, None] * HEAD_DIM + dims[None, :],
        result.to(element),
        mask=real[:, None] & in_dim[None, :],
    )
    if LSE:
        tl.store(out_lse + destination, (top + tl.log2(total)) * LN2, mask=real)
