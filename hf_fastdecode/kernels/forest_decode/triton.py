"""The kernel of nodes, and the arithmetic that all kernels of forest decoding share.

`node_partials` is a stream-K kernel (LeanAttention, section 4): the key tiles of all nodes, heads and query tiles are
cut into shares for a fixed grid, see `schedule`. The queries of all rows of a node, and of a group of query heads,
fill the rows of a tensor-core tile, so that a key tile is read once for all of them. Every piece leaves an fp32
partial in the workspace.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # a running maximum before anything was seen: no infinity, which less itself is no number


@triton.jit
def cap_scores(scores, cap):
    """``cap * tanh(scores / cap)``: near 0 by its series, where the logistic function would lose digits."""
    x = scores / cap
    far = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    y = x * x
    tail = 62.0 / 2835.0 - y * (1382.0 / 155925.0)
    near = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0 - y * tail))))
    return cap * tl.where(y < 0.16, near, far)


@triton.jit
def aligned(address, element: tl.constexpr):
    """A pointer from an address that is a multiple of 16, which the compiler must know to load 16 bytes at a time.

    The hint stands on the conversion: on a sum of pointer and offset it is lost when another offset is added to that.
    """
    return tl.multiple_of(tl.cast(address, tl.pointer_type(element)), 16)


@triton.jit
def scores_of(query, keys, scale, soft_cap, SOFT_CAP: tl.constexpr):
    """Scores that `see` takes with `factor_of`: raw products, or capped scores."""
    raw = tl.dot(query, tl.trans(keys))
    return cap_scores(raw * scale, soft_cap) if SOFT_CAP else raw


@triton.jit
def factor_of(scale, SOFT_CAP: tl.constexpr):
    """From what `scores_of` returns to scores in base 2."""
    return LOG2E if SOFT_CAP else scale * LOG2E


@triton.jit
def see(scores, factor, values, top, total, acc, element: tl.constexpr):
    """Online softmax: take scores ``[M, N]`` and values ``[N, D]`` into the running maximum (base 2), sum and mean."""
    new_top = tl.maximum(top, tl.max(scores, 1) * factor)
    weights = tl.exp2(scores * factor - new_top[:, None])  # one multiply-add before the exponential
    fade = tl.exp2(top - new_top)
    total = total * fade + tl.sum(weights, 1)
    acc = tl.dot(weights.to(element), values, acc * fade[:, None])
    return new_top, total, acc


@triton.jit
def prefetch(addresses, wanted):
    """Have the 128 bytes at each address brought to L2, where wanted."""
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.ne.s32 some, $2, 0; @some prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def node_partials(
    query,  # [rows, heads, queries, head_dim]
    nodes,  # [3, node_capacity] int64: addresses of a node's keys, of its values, elements between its KV heads
    pieces,  # [pieces, 16] int32, see `schedule.PIECE`; row i is program i's first
    partial_out,  # [pieces, BLOCK_M, head_dim] fp32
    partial_lse,  # [pieces, BLOCK_M] fp32, in base 2 as all in the workspace: nothing is rounded on the way
    contexts,  # [rows] int32: tokens of a row's nodes; this, the next and `window` only with WINDOW
    lengths,  # [rows] int32: tokens in a row's suffix before the new ones
    node_capacity,
    scale,
    soft_cap,
    window,  # a query sees so many tokens, of which it is the last
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
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    each: tl.constexpr = GROUP * QUERIES
    element = query.dtype.element_ty
    factor = factor_of(scale, SOFT_CAP)
    # A program's first piece most often is of the first node, whose addresses need not wait for it.
    known = 0
    some = node_capacity > 0  # the table may be empty
    key_address = tl.load(nodes, mask=some, other=0)
    value_address = tl.load(nodes + node_capacity, mask=some, other=0)
    stride = tl.load(nodes + 2 * node_capacity, mask=some, other=0)
    # Everything but the addresses stands in the piece's own row: fewer loads wait for each other.
    entry = pieces + tl.program_id(0) * 16
    node = tl.load(entry)
    head = tl.load(entry + 1)
    tile = tl.load(entry + 2)
    first = tl.load(entry + 3)
    last = tl.load(entry + 4)
    length = tl.load(entry + 5)
    row_start = tl.load(entry + 6)
    row_count = tl.load(entry + 7)
    slot = tl.load(entry + 8)
    following = tl.load(entry + 9)
    position = tl.load(entry + 10)
    if PDL and not WINDOW and node == 0:
        # Nodes were written long before the kernel that this one overlaps: their first tile need not wait for it.
        line = tl.arange(0, BLOCK_N * BLOCK_D // 64) * 128
        skip = (head * stride + first.to(tl.int64) * BLOCK_N * HEAD_DIM) * 2
        wanted = line < (tl.minimum(last * BLOCK_N, length) - first * BLOCK_N) * (HEAD_DIM * 2)
        prefetch(key_address + skip + line, wanted)
        prefetch(value_address + skip + line, wanted)
    if PDL and node < 0:  # the grid is wider than the work; who waits for this kernel waits for those before it too
        tl.extra.cuda.gdc_wait()
    while node >= 0:
        if node != known:
            known = node
            key_address = tl.load(nodes + node)
            value_address = tl.load(nodes + node_capacity + node)
            stride = tl.load(nodes + 2 * node_capacity + node)
        keys = aligned(key_address + head * stride * (element.primitive_bitwidth // 8), element)
        values = aligned(value_address + head * stride * (element.primitive_bitwidth // 8), element)

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
        if PDL:
            for line in tl.static_range(0, HEAD_DIM * 2, 128):
                prefetch((query + where).to(tl.int64) + line, in_tile)
            # Dependents may start once every program is here; they read what earlier kernels wrote, so those must be
            # done.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        q = tl.load(query + where[:, None] + dims[None, :], mask=in_tile[:, None] & in_dim[None, :], other=0.0)

        top = tl.full([BLOCK_M], LOWEST, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        whole = tl.minimum(last, length // BLOCK_N)  # tiles before this one need no mask
        if WINDOW:  # the first key that each query sees; tiles before the first of them all are skipped
            own = tl.load(contexts + row, mask=in_tile, other=0) + tl.load(lengths + row, mask=in_tile, other=0)
            oldest = own + within % QUERIES - window + 1 - position
            first = tl.minimum(last, tl.maximum(first, tl.min(tl.where(in_tile, oldest, length), 0) // BLOCK_N))
        tile_at = tl.arange(0, BLOCK_N)[:, None] * HEAD_DIM + dims[None, :]
        step = tl.full([], BLOCK_N * HEAD_DIM, tl.int64)  # a node may hold more numbers than 32 bits count
        for key_tile in tl.range(first, whole, num_stages=STAGES):
            if HEAD_DIM == BLOCK_D:
                k = tl.load(keys + key_tile * step + tile_at)
                v = tl.load(values + key_tile * step + tile_at)
            else:
                k = tl.load(keys + key_tile * step + tile_at, mask=in_dim[None, :], other=0.0)
                v = tl.load(values + key_tile * step + tile_at, mask=in_dim[None, :], other=0.0)
            scores = scores_of(q, k, scale, soft_cap, SOFT_CAP)
            if WINDOW:
                key = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                scores = tl.where(key[None, :] >= oldest[:, None], scores, -float("inf"))
            top, total, acc = see(scores, factor, v, top, total, acc, element)
        if whole < last:
            seen = whole * BLOCK_N + tl.arange(0, BLOCK_N) < length
            k = tl.load(keys + whole * step + tile_at, mask=seen[:, None] & in_dim[None, :], other=0.0)
            v = tl.load(values + whole * step + tile_at, mask=seen[:, None] & in_dim[None, :], other=0.0)
            scores = scores_of(q, k, scale, soft_cap, SOFT_CAP)
            scores = tl.where(seen[None, :], scores, -float("inf"))
            if WINDOW:
                last_key = whole * BLOCK_N + tl.arange(0, BLOCK_N)
                scores = tl.where(last_key[None, :] >= oldest[:, None], scores, -float("inf"))
            top, total, acc = see(scores, factor, v, top, total, acc, element)

        at_row = slot * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        # Under a window a query may see nothing of a piece.
        saw = total > 0
        total = tl.where(saw, total, 1.0)
        tl.store(partial_lse + at_row, tl.where(saw, top + tl.log2(total), -float("inf")), mask=in_tile)
        result = acc * (1.0 / total)[:, None]
        kept = in_tile[:, None] & in_dim[None, :]
        tl.store(partial_out + at_row[:, None] * HEAD_DIM + dims[None, :], result, mask=kept)

        entry = pieces + tl.maximum(following, 0) * 16
        node = tl.where(following >= 0, tl.load(entry), -1)
        head = tl.load(entry + 1)
        tile = tl.load(entry + 2)
        first = tl.load(entry + 3)
        last = tl.load(entry + 4)
        length = tl.load(entry + 5)
        row_start = tl.load(entry + 6)
        row_count = tl.load(entry + 7)
        slot = tl.load(entry + 8)
        following = tl.load(entry + 9)
        position = tl.load(entry + 10)
