# mypy: ignore-errors
"""Producer warp of `hopper_node_partials`: loads key and value tiles by TMA ahead of time."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

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
    keys,
    values,
    node_capacity,
    kv_heads,
    BLOCK_N: gl.constexpr,
    HEAD_DIM: gl.constexpr,
    STAGES: gl.constexpr,
    PLANE: gl.constexpr,
    ADDRESS_BITS: gl.constexpr,
):
    """Producer warp: runs ahead of the consumers by up to `STAGES` tiles."""
    pieces = tensors[1]
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
                # These pieces' descriptors share one place in memory: wait for all copies in flight, since `count`
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
