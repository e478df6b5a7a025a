# mypy: ignore-errors
"""Products and attention in a fixed order of sums: tiles, splits and blocks are constants, counted from 0.

What depends on the number of rows is how many programs there are, and never what one of them adds up in which order.
A key's block and split follow from its position in its row: how rows share keys, in steps and in passes of whole
rows, changes who computes a split, and not its bits.
"""

import triton
import triton.language as tl

from ..forest_decode.node_kernel import LN2, LOG2E, LOWEST, row_pointers


@triton.jit
def product(a, b, sums, WIDE: tl.constexpr):
    """``sums + a @ b``, of fp32 without TF32; with WIDE in fp32, as Triton's interpreter takes bf16 for integers."""
    if WIDE:
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, sums, input_precision="ieee")


@triton.jit(do_not_specialize=["rows"])
def linear(
    x,  # [rows, WIDTH], contiguous
    weight,  # [COLUMNS, WIDTH]
    bias,  # [COLUMNS]; only with BIAS
    out,  # [rows, COLUMNS]
    rows,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A tile of ``x @ weight.T``: one program sums the whole width, from its begin on."""
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    x_at = x + row.to(tl.int64)[:, None] * WIDTH + k[None, :]
    weight_at = weight + column.to(tl.int64)[:, None] * WIDTH + k[None, :]
    in_x, in_weight = (row < rows)[:, None], (column < COLUMNS)[:, None]
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
        if WIDTH % BLOCK_K == 0:
            a = tl.load(x_at + start, mask=in_x, other=0.0)
            b = tl.load(weight_at + start, mask=in_weight, other=0.0)
        else:
            in_width = (k < WIDTH - start)[None, :]
            a = tl.load(x_at + start, mask=in_x & in_width, other=0.0)
            b = tl.load(weight_at + start, mask=in_weight & in_width, other=0.0)
        sums = product(a, tl.trans(b), sums, WIDE)
    if BIAS:
        sums += tl.load(bias + column, mask=column < COLUMNS, other=0.0).to(tl.float32)[None, :]
    at = out + row.to(tl.int64)[:, None] * COLUMNS + column[None, :]
    tl.store(at, sums.to(out.dtype.element_ty), mask=in_x & (column < COLUMNS)[None, :])


@triton.jit
def attend_split(
    query,  # [tokens, HEADS, HEAD_DIM], contiguous
    items,  # [items, 5] int32: first entry, entries, first of `runs`, how many of them, split
    entries,  # [entries, 3] int32: query, and the first and the last position that it sees
    runs,  # [any, 2] int32: number of a run of keys, and the position of its first one
    addresses,  # [runs, 6] int64: of keys and values; strides of their heads and tokens, in elements
    partial_out,  # [entries, HEADS, HEAD_DIM] fp32: not divided by the sum
    partial_max,  # [entries, HEADS] fp32, base 2
    partial_sum,  # as `partial_max`
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,  # query heads per KV head
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT: tl.constexpr,  # positions, a multiple of BLOCK_N
    STAGES: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Attention of queries that share their keys in one split, for one KV head."""
    element: tl.constexpr = query.dtype.element_ty
    size: tl.constexpr = element.primitive_bitwidth // 8
    head = tl.program_id(1)
    item = items + tl.program_id(0) * 5
    first_entry, count, split = tl.load(item), tl.load(item + 1), tl.load(item + 4)
    first_run = tl.load(item + 2)
    last_run = first_run + tl.load(item + 3)
    packed = tl.arange(0, BLOCK_M)
    in_tile = packed < count * GROUP
    entry = (first_entry + packed // GROUP).to(tl.int64)
    query_head = head * GROUP + packed % GROUP
    token = tl.load(entries + entry * 3, mask=in_tile, other=0).to(tl.int64)
    oldest = tl.load(entries + entry * 3 + 1, mask=in_tile, other=0)
    newest = tl.load(entries + entry * 3 + 2, mask=in_tile, other=-1)
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    kept = in_tile[:, None] & in_dim[None, :]
    q = tl.load(query + ((token * HEADS + query_head) * HEAD_DIM)[:, None] + dims[None, :], mask=kept, other=0.0)

    scale_log2 = scale * LOG2E
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Blocks that no query of the tile sees would change nothing.
    stop = tl.minimum((split + 1) * SPLIT, tl.max(newest, 0) + 1)
    start = tl.min(tl.where(in_tile, oldest, (split + 1) * SPLIT), 0)
    start = tl.maximum(split * SPLIT, start // BLOCK_N * BLOCK_N)
    for first in tl.range(start, stop, BLOCK_N, num_stages=STAGES):
        position = first + tl.arange(0, BLOCK_N)
        key_at = tl.zeros([BLOCK_N], tl.int64)
        value_at = tl.zeros([BLOCK_N], tl.int64)
        for run in range(first_run, last_run):
            begin = tl.load(runs + 2 * run + 1)
            of_run = addresses + tl.load(runs + 2 * run).to(tl.int64) * 6
            index = (position - begin).to(tl.int64)
            of_keys = tl.load(of_run) + (head * tl.load(of_run + 2) + index * tl.load(of_run + 3)) * size
            of_values = tl.load(of_run + 1) + (head * tl.load(of_run + 4) + index * tl.load(of_run + 5)) * size
            key_at = tl.where(position >= begin, of_keys, key_at)
            value_at = tl.where(position >= begin, of_values, value_at)
        stored = (position < stop)[:, None] & in_dim[None, :]
        k = tl.load(row_pointers(key_at, dims, element), mask=stored, other=0.0)
        v = tl.load(row_pointers(value_at, dims, element), mask=stored, other=0.0)
        scores = product(q, tl.trans(k), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), WIDE)
        visible = (position[None, :] >= oldest[:, None]) & (position[None, :] <= newest[:, None])
        scores = tl.where(visible, scores, -float("inf"))
        new_row_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_row_max[:, None])
        rescale = tl.exp2(row_max - new_row_max)
        row_sum = row_sum * rescale + tl.sum(weights, 1)
        acc = product(weights.to(element), v, acc * rescale[:, None], WIDE)
        row_max = new_row_max

    at = entry * HEADS + query_head
    tl.store(partial_out + (at * HEAD_DIM)[:, None] + dims[None, :], acc, mask=kept)
    tl.store(partial_max + at, row_max, mask=in_tile)
    tl.store(partial_sum + at, row_sum, mask=in_tile)


@triton.jit(do_not_specialize=["first", "count", "tokens", "splits"])
def merge_splits(
    slots,  # [count, splits] int32: the entry of each split; -1 for one of which a query sees nothing
    partial_out,  # as of `attend_split`
    partial_max,
    partial_sum,
    out,  # [tokens, HEADS, HEAD_DIM], contiguous
    lse,  # [HEADS, tokens] fp32, natural logarithm
    first,  # the first query's token
    count,
    tokens,
    splits,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """The splits of some heads of queries, in the order of positions."""
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    query, head = row // HEADS, row % HEADS
    in_rows = query < count
    dims = tl.arange(0, BLOCK_D)
    in_dim = (dims < HEAD_DIM)[None, :]
    row_max = tl.full([BLOCK_R], LOWEST, tl.float32)
    row_sum = tl.zeros([BLOCK_R], tl.float32)
    acc = tl.zeros([BLOCK_R, BLOCK_D], tl.float32)
    for split in range(0, splits):
        entry = tl.load(slots + query.to(tl.int64) * splits + split, mask=in_rows, other=-1).to(tl.int64)
        at, there = entry * HEADS + head, entry >= 0
        part_max = tl.load(partial_max + at, mask=there, other=LOWEST)
        part_sum = tl.load(partial_sum + at, mask=there, other=0.0)
        part_at = partial_out + (at * HEAD_DIM)[:, None] + dims[None, :]
        part = tl.load(part_at, mask=there[:, None] & in_dim, other=0.0)
        new_row_max = tl.maximum(row_max, part_max)
        rescale, weight = tl.exp2(row_max - new_row_max), tl.exp2(part_max - new_row_max)
        row_sum = row_sum * rescale + part_sum * weight
        acc = acc * rescale[:, None] + part * weight[:, None]
        row_max = new_row_max
    token = (first + query).to(tl.int64)
    row_sum = tl.where(in_rows, row_sum, 1.0)
    result = (acc * (1.0 / row_sum)[:, None]).to(out.dtype.element_ty)
    at = out + ((token * HEADS + head) * HEAD_DIM)[:, None] + dims[None, :]
    tl.store(at, result, mask=in_rows[:, None] & in_dim)
    tl.store(lse + head.to(tl.int64) * tokens + token, (row_max + tl.log2(row_sum)) * LN2, mask=in_rows)
