# mypy: ignore-errors
"""Node kernel: stream-K attention over the nodes of a forest, and the online softmax of all decode kernels.

The key tiles of all nodes, heads and query tiles are cut into equal shares for a fixed grid (LeanAttention, section 4;
`schedule`). The queries of all rows of a node, and of a group of query heads, form one query tile, so that a key tile
is read once for all of them. Every piece writes an fp32 partial to the workspace.
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
LOWEST = tl.constexpr(-1e30)  # initial row max: finite, because -inf - (-inf) is NaN


@triton.jit
def cap_scores(scores, cap):
    """``cap * tanh(scores / cap)``, near 0 by its Taylor series, where the logistic form loses digits."""
    x = scores / cap
    far = 2.0 / (1.0 + tl.exp(-2.0 * x)) - 1.0
    y = x * x
    tail = 62.0 / 2835.0 - y * (1382.0 / 155925.0)
    near = x * (1.0 - y * (1.0 / 3.0 - y * (2.0 / 15.0 - y * (17.0 / 315.0 - y * tail))))
    return cap * tl.where(y < 0.16, near, far)


@triton.jit
def aligned(address, element: tl.constexpr):
    """A pointer from an address that is a multiple of 16, with the hint that allows 16-byte loads.

    The hint is on the conversion, because on a sum it is lost when another offset is added.
    """
    return tl.multiple_of(tl.cast(address, tl.pointer_type(element)), 16)


@triton.jit
def qk_scores(
    query, keys, scale, soft_cap, SOFT_CAP: tl.constexpr, query_rest=None, keys_rest=None, REST: tl.constexpr = 0
):
    """Scores before `base2_scale`: raw products, or with a soft cap scaled and capped ones.

    With REST, keys go on in ``keys_rest``, and queries in ``query_rest``.
    """
    raw = tl.dot(query, tl.trans(keys))
    if REST:
        raw = tl.dot(query_rest, tl.trans(keys_rest), raw)
    return cap_scores(raw * scale, soft_cap) if SOFT_CAP else raw


@triton.jit
def base2_scale(scale, SOFT_CAP: tl.constexpr):
    """Factor from `qk_scores` to scores in base 2."""
    return LOG2E if SOFT_CAP else scale * LOG2E


@triton.jit
def distance_biases(biases, head, age, DISTANCES: tl.constexpr):
    """Biases of a head for keys that are `age` tokens before a query; the last one for all farther keys."""
    return tl.load(biases + head * DISTANCES + tl.minimum(tl.maximum(age, 0), DISTANCES - 1))


@triton.jit
def online_softmax_step(scores, scale_log2, values, row_max, row_sum, acc, element: tl.constexpr):
    """Online softmax: add scores ``[M, N]`` and values ``[N, D]`` to row max (base 2), row sum and accumulator."""
    new_row_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_row_max[:, None])  # one multiply-add before the exponential
    rescale = tl.exp2(row_max - new_row_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(element), values, acc * rescale[:, None])
    return new_row_max, row_sum, acc


@triton.jit
def prefetch(addresses, wanted):
    """Prefetch the 128 bytes at each address to L2, where wanted."""
    tl.inline_asm_elementwise(
        "{ .reg .pred some; setp.ne.s32 some, $2, 0; @some prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
        "=r,l,r",
        [addresses, wanted.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def load_piece(pieces, index):
    """Columns `schedule.PIECE` of a piece: all but the addresses, so that few loads depend on each other."""
    row = pieces + index * 16
    node, head, tile = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    first, last, length = tl.load(row + 3), tl.load(row + 4), tl.load(row + 5)
    row_start, row_count, slot = tl.load(row + 6), tl.load(row + 7), tl.load(row + 8)
    return node, head, tile, first, last, length, row_start, row_count, slot, tl.load(row + 9), tl.load(row + 10)


@triton.jit
def load_node(nodes, node, capacity, valid, SEPARATE: tl.constexpr):
    """Addresses of a node's keys and values, stride of its KV heads, and with SEPARATE the other elements' address."""
    keys = tl.load(nodes + node, mask=valid, other=0)
    values = tl.load(nodes + capacity + node, mask=valid, other=0)
    stride = tl.load(nodes + 2 * capacity + node, mask=valid, other=0)
    rest = tl.load(nodes + 3 * capacity + node, mask=valid, other=0) if SEPARATE else values
    return keys, values, stride, rest


@triton.jit
def chain_rows(
    chain, nodes, node_capacity, head, token, SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, CHAIN: tl.constexpr
):
    """Addresses of the keys and values of tokens that are counted through a chain of nodes, ``[BLOCK_N]`` each."""
    keys = tl.zeros_like(token).to(tl.int64)
    values = keys
    for index in tl.static_range(CHAIN):
        node = tl.load(chain + 2 * index)
        start = tl.load(chain + 2 * index + 1)
        skip = (head * tl.load(nodes + 2 * node_capacity + node) - start.to(tl.int64) * HEAD_DIM) * SIZE
        here = token >= start
        keys = tl.where(here, tl.load(nodes + node) + skip, keys)
        values = tl.where(here, tl.load(nodes + node_capacity + node) + skip, values)
    offset = token.to(tl.int64) * (HEAD_DIM * SIZE)
    return keys + offset, values + offset


@triton.jit
def row_pointers(rows, dims, element: tl.constexpr):
    """Pointers ``[BLOCK_N, D]`` into rows at these addresses, which are multiples of 16."""
    return tl.multiple_of(tl.cast(rows[:, None], tl.pointer_type(element)), [16, 16]) + dims[None, :]


@triton.jit(
    # Values that differ from call to call, and tables that are read an element at a time.
    do_not_specialize=["node_capacity", "window"],
    do_not_specialize_on_alignment=["nodes", "pieces", "contexts", "lengths"],
)
def node_partials(
    query,  # [rows, heads, queries, head_dim + rest]
    nodes,  # [3, node_capacity] int64: addresses of a node's keys and values, stride of its KV heads; with REST and
    # not LATENTS [4, node_capacity]: also the address of the keys' other elements
    pieces,  # [pieces, 16] int32, see `schedule.PIECE`; row i is program i's first
    partial_out,  # [pieces, BLOCK_M, head_dim] fp32
    partial_lse,  # [pieces, BLOCK_M] fp32, base 2, which saves a conversion and its rounding
    chains,  # [nodes, CHAIN, 2] int32: node and first token of each link; only with CHAIN > 1
    contexts,  # [rows] int32: tokens of a row's nodes; like the next only with WINDOW or DISTANCES
    lengths,  # [rows] int32: tokens in a row's suffix before this step
    biases,  # [heads, DISTANCES] fp32: with DISTANCES, added to the score of a key by how far it is before the query
    node_capacity,
    scale,
    soft_cap,
    window,  # with WINDOW, a query sees the last `window` tokens up to its position
    query_row_stride,
    query_head_stride,
    query_stride,
    GROUP: tl.constexpr,  # query heads per KV head
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    REST: tl.constexpr,  # elements of keys that are the same for all KV heads, and are stored separately
    BLOCK_R: tl.constexpr,
    LATENTS: tl.constexpr,  # whether keys are values too; the values' address is then that of the keys' REST
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    WINDOW: tl.constexpr,
    STAGES: tl.constexpr,
    DISTANCES: tl.constexpr,  # number of distances with a separate bias; 0 for no biases
    CHAIN: tl.constexpr,  # most nodes that a query tile reads as one; not with WINDOW or DISTANCES
    PDL: tl.constexpr,
):
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    rest = tl.arange(0, BLOCK_R)
    in_rest = rest < REST
    queries_per_kv_head: tl.constexpr = GROUP * QUERIES
    element = query.dtype.element_ty
    size: tl.constexpr = element.primitive_bitwidth // 8
    scale_log2 = base2_scale(scale, SOFT_CAP)
    # Most first pieces are of node 0: load its addresses without waiting for the piece.
    loaded_node = 0
    has_nodes = node_capacity > 0  # the table may be empty
    SEPARATE: tl.constexpr = REST > 0 and not LATENTS
    key_address, value_address, stride, rest_address = load_node(nodes, 0, node_capacity, has_nodes, SEPARATE)
    piece = load_piece(pieces, tl.program_id(0))
    node, head, tile, first, last, length, row_start, row_count, slot, following, position = piece
    if CHAIN == 1 and node > 0:
        loaded_node = node
        key_address, value_address, stride, rest_address = load_node(nodes, node, node_capacity, True, SEPARATE)
    if PDL and not WINDOW and node >= 0:
        # Prefetch the first tile before the kernel that this one overlaps ends, which does not write nodes.
        if CHAIN > 1:
            token = first * BLOCK_N + tl.arange(0, BLOCK_N)
            chain = chains + node * (2 * CHAIN)
            key_rows, value_rows = chain_rows(chain, nodes, node_capacity, head, token, size, HEAD_DIM, CHAIN)
            wanted = token < tl.minimum(last * BLOCK_N, length)
            for line in tl.static_range(0, HEAD_DIM * 2, 128):
                prefetch(key_rows + line, wanted)
                prefetch(value_rows + line, wanted)
        else:
            line = tl.arange(0, BLOCK_N * BLOCK_D // 64) * 128
            skip = (head * stride + first.to(tl.int64) * BLOCK_N * HEAD_DIM) * 2
            wanted = line < (tl.minimum(last * BLOCK_N, length) - first * BLOCK_N) * (HEAD_DIM * 2)
            prefetch(key_address + skip + line, wanted)
            if not LATENTS:
                prefetch(value_address + skip + line, wanted)
    if PDL and node < 0:  # PDL: dependents also rely on earlier kernels, so wait even without work
        tl.extra.cuda.gdc_wait()
    while node >= 0:
        if CHAIN == 1 and node != loaded_node:
            loaded_node = node
            key_address, value_address, stride, rest_address = load_node(nodes, node, node_capacity, True, SEPARATE)
        keys = aligned(key_address + head * stride * size, element)
        values = aligned(value_address + head * stride * size, element)
        rests = aligned(rest_address, element) if SEPARATE else values
        chain = chains + node * (2 * CHAIN)

        # Packed query i belongs to row i // queries_per_kv_head; its head and position within the row are
        # i % queries_per_kv_head.
        packed = tile * BLOCK_M + tl.arange(0, BLOCK_M)
        row = row_start + packed // queries_per_kv_head
        within = packed % queries_per_kv_head
        query_at = (
            row.to(tl.int64) * query_row_stride
            + (head * GROUP + within // QUERIES) * query_head_stride
            + (within % QUERIES) * query_stride
        )
        in_tile = packed < row_count * queries_per_kv_head
        if PDL:
            for line in tl.static_range(0, HEAD_DIM * 2, 128):
                prefetch((query + query_at).to(tl.int64) + line, in_tile)
            # PDL: dependents also rely on earlier kernels, so wait before releasing them.
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        q = tl.load(query + query_at[:, None] + dims[None, :], mask=in_tile[:, None] & in_dim[None, :], other=0.0)
        q_rest = q
        if REST:
            has_rest = in_tile[:, None] & in_rest[None, :]
            q_rest = tl.load(query + query_at[:, None] + HEAD_DIM + rest[None, :], mask=has_rest, other=0.0)

        row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
        row_sum = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        full_tiles = tl.minimum(last, length // BLOCK_N)  # tiles before this one need no mask
        if WINDOW or DISTANCES > 0:  # the queries' positions, counted from the node's first token
            own = tl.load(contexts + row, mask=in_tile, other=0) + tl.load(lengths + row, mask=in_tile, other=0)
            stands = own + within % QUERIES - position
            query_head = head * GROUP + within // QUERIES
        if WINDOW:  # oldest visible key per query; tiles before the minimum are skipped
            oldest = stands - window + 1
            first = tl.minimum(last, tl.maximum(first, tl.min(tl.where(in_tile, oldest, length), 0) // BLOCK_N))
        tile_at = tl.arange(0, BLOCK_N)[:, None] * HEAD_DIM + dims[None, :]
        step = tl.full([], BLOCK_N * HEAD_DIM, tl.int64)  # offsets in a node may exceed 32 bits
        rest_at = tl.arange(0, BLOCK_N)[:, None] * REST + rest[None, :]
        rest_step = tl.full([], BLOCK_N * REST, tl.int64)
        for key_tile in tl.range(first, full_tiles, num_stages=STAGES):
            if CHAIN > 1:
                token = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                key_rows, value_rows = chain_rows(chain, nodes, node_capacity, head, token, size, HEAD_DIM, CHAIN)
                k = tl.load(row_pointers(key_rows, dims, element), mask=in_dim[None, :], other=0.0)
                v = tl.load(row_pointers(value_rows, dims, element), mask=in_dim[None, :], other=0.0)
            elif LATENTS:
                k = tl.load(keys + key_tile * step + tile_at, mask=in_dim[None, :], other=0.0)
                v = k
            elif HEAD_DIM == BLOCK_D:
                k = tl.load(keys + key_tile * step + tile_at)
                v = tl.load(values + key_tile * step + tile_at)
            else:
                k = tl.load(keys + key_tile * step + tile_at, mask=in_dim[None, :], other=0.0)
                v = tl.load(values + key_tile * step + tile_at, mask=in_dim[None, :], other=0.0)
            k_rest = k
            if REST:
                k_rest = tl.load(rests + key_tile * rest_step + rest_at, mask=in_rest[None, :], other=0.0)
            scores = qk_scores(q, k, scale, soft_cap, SOFT_CAP, q_rest, k_rest, REST)
            if DISTANCES > 0:
                age = stands[:, None] - (key_tile * BLOCK_N + tl.arange(0, BLOCK_N))[None, :]
                scores += distance_biases(biases, query_head[:, None], age, DISTANCES) / scale
            if WINDOW:
                key = key_tile * BLOCK_N + tl.arange(0, BLOCK_N)
                scores = tl.where(key[None, :] >= oldest[:, None], scores, -float("inf"))
            row_max, row_sum, acc = online_softmax_step(scores, scale_log2, v, row_max, row_sum, acc, element)
        if full_tiles < last:
            token = full_tiles * BLOCK_N + tl.arange(0, BLOCK_N)
            in_node = token < length
            kept = in_node[:, None] & in_dim[None, :]
            if CHAIN > 1:
                key_rows, value_rows = chain_rows(chain, nodes, node_capacity, head, token, size, HEAD_DIM, CHAIN)
                k = tl.load(row_pointers(key_rows, dims, element), mask=kept, other=0.0)
                v = tl.load(row_pointers(value_rows, dims, element), mask=kept, other=0.0)
            else:
                k = tl.load(keys + full_tiles * step + tile_at, mask=kept, other=0.0)
                v = k if LATENTS else tl.load(values + full_tiles * step + tile_at, mask=kept, other=0.0)
            k_rest = k
            if REST:
                kept_rest = in_node[:, None] & in_rest[None, :]
                k_rest = tl.load(rests + full_tiles * rest_step + rest_at, mask=kept_rest, other=0.0)
            scores = qk_scores(q, k, scale, soft_cap, SOFT_CAP, q_rest, k_rest, REST)
            if DISTANCES > 0:
                age = stands[:, None] - token[None, :]
                scores += distance_biases(biases, query_head[:, None], age, DISTANCES) / scale
            scores = tl.where(in_node[None, :], scores, -float("inf"))
            if WINDOW:
                scores = tl.where(token[None, :] >= oldest[:, None], scores, -float("inf"))
            row_max, row_sum, acc = online_softmax_step(scores, scale_log2, v, row_max, row_sum, acc, element)

        at_row = slot * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
        # Under a window, a query may see no key of a piece.
        has_keys = row_sum > 0
        row_sum = tl.where(has_keys, row_sum, 1.0)
        tl.store(partial_lse + at_row, tl.where(has_keys, row_max + tl.log2(row_sum), -float("inf")), mask=in_tile)
        result = acc * (1.0 / row_sum)[:, None]
        kept = in_tile[:, None] & in_dim[None, :]
        tl.store(partial_out + at_row[:, None] * HEAD_DIM + dims[None, :], result, mask=kept)

        more = following >= 0
        piece = load_piece(pieces, tl.maximum(following, 0))
        node, head, tile, first, last, length, row_start, row_count, slot, following, position = piece
        node = tl.where(more, node, -1)
