# mypy: ignore-errors
"""Warp-specialised `node_partials` for Hopper GPUs (compute capability 9.0) and compute-bound query tiles.

A producer warp loads key and value tiles to shared memory by TMA; two consumer warpgroups compute 64 packed queries
each. The matrix products of one tile overlap the exponentials of another, within a warpgroup and between the two
(FlashAttention-3, section 3). Written in Gluon, Triton's language with explicit layouts.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .node_kernel import LOG2E, cap_scores, prefetch


@gluon.jit
def _row_sums_per_thread(weights, BLOCK_N: gl.constexpr):
    """Row sums over the columns of one thread, ``[64, 4]``; a row's four threads are added up at the end."""
    return gl.sum(gl.sum(gl.reshape(weights, [64, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def _mask_last_tile(scores, columns, tile, length, BLOCK_N: gl.constexpr):
    """Mask the last tile: -inf for tokens past the node's end, and for those of the tile before."""
    token = tile_start(tile, length, BLOCK_N) + columns
    return gl.where(((token >= tile * BLOCK_N) & (token < length))[None, :], scores, -float("inf"))


@gluon.jit
def _consume(
    tensors,
    rings,
    scalars,
    WARPGROUP: gl.constexpr,  # index of the 64 packed queries in the tile
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    PDL: gl.constexpr,
):
    """Consumer warpgroup: attention of 64 packed queries over the key tiles of the program's pieces."""
    query, pieces, partial_out, partial_lse = tensors
    scale, soft_cap, query_row_stride, query_head_stride, query_stride = scalars
    q_memory = rings[0].index(WARPGROUP)
    k_ring, k_full, k_free = rings[1]
    v_ring, v_full, v_free = rings[2]
    element: gl.constexpr = query.dtype.element_ty
    queries_per_kv_head: gl.constexpr = GROUP * QUERIES
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HEAD_DIM, HEAD_DIM // 8], [4, 1], [1, 0])
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    scale_log2 = LOG2E if SOFT_CAP else scale * LOG2E
    columns = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, s_layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, load_layout))
    zero = gl.zeros([64, BLOCK_N], gl.float32, s_layout)
    piece = gl.program_id(0)
    count = 0
    while piece >= 0:
        piece_row = pieces + piece * 16
        head = gl.load(piece_row + 1)
        tile = gl.load(piece_row + 2)
        first = gl.load(piece_row + 3)
        last = gl.load(piece_row + 4)
        length = gl.load(piece_row + 5)
        row_start = gl.load(piece_row + 6)
        row_count = gl.load(piece_row + 7)
        slot = gl.load(piece_row + 8)
        piece = gl.load(piece_row + 9)
        if first < last:
            # Packed query i belongs to row i // queries_per_kv_head; its head and position within the row are
            # i % queries_per_kv_head.
            packed = tile * BLOCK_M + WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, load_layout))
            row = row_start + packed // queries_per_kv_head
            within = packed % queries_per_kv_head
            query_at = (
                row.to(gl.int64) * query_row_stride
                + (head * GROUP + within // QUERIES) * query_head_stride
                + (within % QUERIES) * query_stride
            )
            in_tile = packed < row_count * queries_per_kv_head
            if PDL:
                for line in gl.static_range(0, HEAD_DIM * 2, 128):
                    prefetch((query + query_at).to(gl.int64) + line, in_tile)
                # PDL: dependents also rely on earlier kernels, so wait before releasing them. Nodes are older, so the
                # producer need not wait.
                gdc_wait()
                gdc_launch_dependents()
            q = gl.load(query + query_at[:, None] + dims[None, :], mask=in_tile[:, None], other=0.0)
            group_barrier()  # all products of the previous piece have read its queries
            q_memory.store(q)
            fence_async_shared()
            group_barrier()

            masked_tile = length // BLOCK_N  # the tile that needs a mask
            o = gl.zeros([64, HEAD_DIM], gl.float32, o_layout)
            stage = count % STAGES
            phase = count // STAGES & 1
            mbarrier.wait(k_full.index(stage), phase)
            s = warpgroup_mma(q_memory, k_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, [s])
            mbarrier.arrive(k_free.index(stage), count=1)
            if SOFT_CAP:
                s = cap_scores(s * scale, soft_cap)
            if first == masked_tile:
                s = _mask_last_tile(s, columns, masked_tile, length, BLOCK_N)
            row_max = gl.max(s, 1) * scale_log2
            s = gl.exp2(s * scale_log2 - row_max[:, None])
            row_sum = _row_sums_per_thread(s, BLOCK_N)
            row_sum_layout: gl.constexpr = gl.SliceLayout(1, row_sum.type.layout)
            p = gl.convert_layout(s.to(element), p_layout)
            mbarrier.wait(k_full.index((count + 1) % STAGES), (count + 1) // STAGES & 1, pred=first + 1 < last)
            for at in range(first + 1, last):
                v_stage = stage
                v_phase = phase
                count += 1
                stage = count % STAGES
                phase = count // STAGES & 1
                s_next = warpgroup_mma(
                    q_memory, k_ring.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True
                )
                mbarrier.wait(v_full.index(v_stage), v_phase)
                o_next = warpgroup_mma(p, v_ring.index(v_stage), o, is_async=True)
                s = warpgroup_mma_wait(1, [s_next])
                mbarrier.arrive(k_free.index(stage), count=1)
                if SOFT_CAP:
                    s = cap_scores(s * scale, soft_cap)
                if at == masked_tile:
                    s = _mask_last_tile(s, columns, masked_tile, length, BLOCK_N)
                new_row_max = gl.maximum(row_max, gl.max(s, 1) * scale_log2)
                rescale = gl.exp2(row_max - new_row_max)
                row_max = new_row_max
                s = gl.exp2(s * scale_log2 - row_max[:, None])
                row_sum = row_sum * gl.convert_layout(rescale, row_sum_layout)[:, None] + _row_sums_per_thread(
                    s, BLOCK_N
                )
                # Its branch also keeps the arithmetic above before the next wait, where it overlaps the product.
                mbarrier.wait(k_full.index((count + 1) % STAGES), (count + 1) // STAGES & 1, pred=at + 1 < last)
                o = warpgroup_mma_wait(0, [o_next])
                mbarrier.arrive(v_free.index(v_stage), count=1)
                p = gl.convert_layout(s.to(element), p_layout)
                o = o * gl.convert_layout(rescale, o_rows)[:, None]
            mbarrier.wait(v_full.index(stage), phase)
            o_last = warpgroup_mma(p, v_ring.index(stage), o, is_async=True)
            o = warpgroup_mma_wait(0, [o_last])
            mbarrier.arrive(v_free.index(stage), count=1)
            count += 1

            row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, s_layout))
            s_row = WARPGROUP * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, s_layout))
            lse_at = partial_lse + slot.to(gl.int64) * BLOCK_M + s_row
            gl.store(lse_at, row_max + gl.log2(row_sum), mask=tile * BLOCK_M + s_row < row_count * queries_per_kv_head)
            o_row = WARPGROUP * 64 + gl.arange(0, 64, layout=o_rows)
            o_at = (slot.to(gl.int64) * BLOCK_M + o_row)[:, None] * HEAD_DIM
            o_at += gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, o_layout))[None, :]
            o = o * gl.convert_layout(1.0 / row_sum, o_rows)[:, None]
            gl.store(partial_out + o_at, o, mask=(tile * BLOCK_M + o_row < row_count * queries_per_kv_head)[:, None])
        elif PDL:  # dependents also rely on earlier kernels, so wait even without work
            gdc_wait()


@gluon.jit(do_not_specialize=["node_capacity"], do_not_specialize_on_alignment=["nodes", "pieces"])
def hopper_node_partials(
    query,  # as in `node_partials`, up to partial_lse; head_dim is 64 or 128
    nodes,
    pieces,
    partial_out,
    partial_lse,
    memory,  # TMA descriptor of all memory, see `all_memory`
    node_capacity,
    kv_heads,
    scale,
    soft_cap,
    query_row_stride,
    query_head_stride,
    query_stride,
    GROUP: gl.constexpr,
    QUERIES: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    BLOCK_M: gl.constexpr,  # 128
    BLOCK_N: gl.constexpr,
    SOFT_CAP: gl.constexpr,
    STAGES: gl.constexpr,  # key and value tiles in flight, at least 2
    PDL: gl.constexpr,
    PLANE: gl.constexpr,  # these as in `memory`
    ADDRESS_BITS: gl.constexpr,
):
    element: gl.constexpr = query.dtype.element_ty
    tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, HEAD_DIM], element)
    q_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, HEAD_DIM], element)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    q_memory = gl.allocate_shared_memory(element, [2, 64, HEAD_DIM], q_tile)
    k_ring = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, HEAD_DIM], tile)
    v_ring = gl.allocate_shared_memory(element, [STAGES, BLOCK_N, HEAD_DIM], tile)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for stage in gl.static_range(STAGES):
        mbarrier.init(k_full.index(stage), count=1)
        mbarrier.init(v_full.index(stage), count=1)
        mbarrier.init(k_free.index(stage), count=2)
        mbarrier.init(v_free.index(stage), count=2)
    # Of 504 registers per thread over three warpgroups, each consumer takes 240.
    tensors = (query, pieces, partial_out, partial_lse)
    keys = (k_ring, k_full, k_free)
    values = (v_ring, v_full, v_free)
    scalars = (scale, soft_cap, query_row_stride, query_head_stride, query_stride)
    rings = (q_memory, keys, values)
    sizes = (node_capacity, kv_heads)
    gl.warp_specialize(
        [
            (
                _consume,
                (tensors, rings, scalars, 0, GROUP, QUERIES, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, SOFT_CAP, PDL),
            ),
            (
                _consume,
                (tensors, rings, scalars, 1, GROUP, QUERIES, HEAD_DIM, BLOCK_M, BLOCK_N, STAGES, SOFT_CAP, PDL),
            ),
            (produce, (tensors, nodes, memory, (keys, values), sizes, BLOCK_N, HEAD_DIM, STAGES, PLANE, ADDRESS_BITS)),
        ],
        [4, 1],
        [240, 24],
    )


# Renamed in Gluon. Remove the first when Triton >= 3.7 is required, the second when Triton >= 3.8 is.
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_tile = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


@gluon.jit
def tile_start(tile, length, BLOCK_N: gl.constexpr):
    """First token of a tile; the last tile ends at the node's end and overlaps the tile before, if there is one."""
    return gl.maximum(gl.minimum(tile * BLOCK_N, length - BLOCK_N), 0)


@gluon.jit
def _load_when_free(
    rings, descriptor, plane, row, count, BLOCK_N: gl.constexpr, HEAD_DIM: gl.constexpr, STAGES: gl.constexpr
):
    """Load a tile of rows into its stage of a ring once that is free.

    ``plane`` and ``row`` are those of `all_memory`, or KV head and token for a descriptor of a node.
    """
    ring, full, free = rings
    stage = count % STAGES
    place = ring.index(stage).reshape([1, BLOCK_N, HEAD_DIM])
    mbarrier.wait(free.index(stage), (count // STAGES & 1) ^ 1)
    mbarrier.expect(full.index(stage), BLOCK_N * HEAD_DIM * 2)
    load_tile(descriptor, [plane, row, 0], full.index(stage), place)


@gluon.jit
def produce(
    tensors,
    nodes,
    memory,
    rings,
    sizes,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    PLANE: gl.constexpr,
    ADDRESS_BITS: gl.constexpr,
):
    """Producer warp: runs ahead of the consumers by up to `STAGES` tiles."""
    pieces = tensors[1]
    keys, values = rings
    node_capacity, kv_heads = sizes
    element: gl.constexpr = tensors[0].dtype.element_ty
    box: gl.constexpr = gl.NVMMASharedLayout(keys[0].index(0).layout.swizzle_byte_width, 16, rank=3)
    piece = gl.program_id(0)
    count = 0
    # Most first pieces are of node 0: load its addresses without waiting for the piece.
    loaded_node = 0
    has_nodes = node_capacity > 0  # the table may be empty
    key_address = gl.load(nodes, mask=has_nodes, other=0)
    value_address = gl.load(nodes + node_capacity, mask=has_nodes, other=0)
    stride = gl.load(nodes + 2 * node_capacity, mask=has_nodes, other=0)
    while piece >= 0:
        piece_row = pieces + piece * 16
        node = gl.load(piece_row)
        head = gl.load(piece_row + 1)
        first = gl.load(piece_row + 3)
        last = gl.load(piece_row + 4)
        length = gl.load(piece_row + 5)
        piece = gl.load(piece_row + 9)
        if node >= 0:
            if node != loaded_node:
                loaded_node = node
                key_address = gl.load(nodes + node)
                value_address = gl.load(nodes + node_capacity + node)
                stride = gl.load(nodes + 2 * node_capacity + node)
            k_address = key_address + head * stride * 2
            v_address = value_address + head * stride * 2
            k_row = k_address // (2 * HEAD_DIM) - 1
            v_row = v_address // (2 * HEAD_DIM) - 1
            # The descriptor of all memory serves nodes that fill a tile, are aligned to its rows and lie in one plane.
            whole_rows = (k_address | v_address) % (2 * HEAD_DIM) == 0
            k_crosses_plane = k_row // PLANE != (k_row + length) // PLANE
            v_crosses_plane = v_row // PLANE != (v_row + length) // PLANE
            inside = (k_address | v_address) >> ADDRESS_BITS == 0
            if (length >= BLOCK_N) & whole_rows & inside & (not k_crosses_plane) & (not v_crosses_plane):
                k_plane = (k_row // PLANE).to(gl.int32)
                v_plane = (v_row // PLANE).to(gl.int32)
                k_from = (k_row % PLANE).to(gl.int32)
                v_from = (v_row % PLANE).to(gl.int32)
                for tile in range(first, last):
                    begin = tile_start(tile, length, BLOCK_N)
                    _load_when_free(keys, memory, k_plane, k_from + begin, count, BLOCK_N, HEAD_DIM, STAGES)
                    _load_when_free(values, memory, v_plane, v_from + begin, count, BLOCK_N, HEAD_DIM, STAGES)
                    count += 1
            else:
                # These pieces' descriptors share one address in memory: wait for all copies in flight, since `count`
                # does not tell which of them read it.
                for back in gl.static_range(1, STAGES + 1):
                    past = count - back
                    mbarrier.wait(keys[1].index(past % STAGES), past // STAGES & 1, pred=past >= 0)
                    mbarrier.wait(values[1].index(past % STAGES), past // STAGES & 1, pred=past >= 0)
                k_base = key_address.to(gl.pointer_type(element))
                v_base = value_address.to(gl.pointer_type(element))
                k_descriptor = tma.make_tensor_descriptor(
                    k_base, [kv_heads, length, HEAD_DIM], [stride, HEAD_DIM, 1], [1, BLOCK_N, HEAD_DIM], box
                )
                v_descriptor = tma.make_tensor_descriptor(
                    v_base, [kv_heads, length, HEAD_DIM], [stride, HEAD_DIM, 1], [1, BLOCK_N, HEAD_DIM], box
                )
                for tile in range(first, last):
                    begin = tile_start(tile, length, BLOCK_N)
                    _load_when_free(keys, k_descriptor, head, begin, count, BLOCK_N, HEAD_DIM, STAGES)
                    _load_when_free(values, v_descriptor, head, begin, count, BLOCK_N, HEAD_DIM, STAGES)
                    count += 1
