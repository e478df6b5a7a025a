# mypy: ignore-errors
"""Products of 33 to 128 rows on Hopper GPUs, warp-specialised; in Gluon, Triton's language with explicit layouts.

A producer warp loads tiles of weights and rows to shared memory by TMA; two consumer warpgroups multiply them. The
iterations over the width of all tiles, laid end to end, are cut into equal shares for a fixed grid (stream-K), so all
multiprocessors read until the end. A program whose share ends within a tile adds up the parts of the programs that
go on with it, in the order of the width: results do not depend on which is first.

With programmatic dependent launch (PDL), weights are loaded while the previous kernel still runs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_wait

from ..forest_decode.hopper import group_barrier, load_tile
from ..pointwise.kernel import activated, follow_previous

BOX = gl.constexpr(64)  # columns of a tile, of each weight


@gluon.jit
def _load_weights(weights, ring, full, at, count, sizes, GATED, AT_ONCE, STAGES):
    """Begin to load the weights of iteration `at`, of all tiles' iterations, into the stage of `count`."""
    iterations, tiles_0, tiles_1 = sizes
    BOXES: gl.constexpr = 2 if GATED else 1
    stage = count % STAGES
    barrier = full.index(stage)
    slot = ring.index(stage * BOXES)
    tile = at // iterations
    number = (at - tile * iterations) * AT_ONCE
    mbarrier.expect(barrier, 2 * AT_ONCE * BOX * BOXES)
    if tile < tiles_0:
        load_tile(weights[0], [tile * BOX, number], barrier, slot)
        if GATED:
            load_tile(weights[1], [tile * BOX, number], barrier, ring.index(stage * BOXES + 1))
    elif tile < tiles_0 + tiles_1:
        load_tile(weights[1], [(tile - tiles_0) * BOX, number], barrier, slot)
    else:
        load_tile(weights[2], [(tile - tiles_0 - tiles_1) * BOX, number], barrier, slot)


@gluon.jit
def _load_rows(x, ring, full, at, count, iterations, BLOCK_M, AT_ONCE, STAGES):
    stage = count % STAGES
    mbarrier.expect(full.index(stage), 2 * AT_ONCE * BLOCK_M)
    load_tile(x, [0, at % iterations * AT_ONCE], full.index(stage), ring.index(stage))


@gluon.jit
def _produce(x, weights, rings, share, sizes, GATED, BLOCK_M, AT_ONCE, X_STAGES, W_STAGES, PDL):
    """Producer warp: runs ahead of the consumers by up to `W_STAGES` iterations of weights and `X_STAGES` of rows."""
    x_ring, w_ring, x_full, w_full, free = rings
    first, last = share
    length = last - first
    for count in range(gl.minimum(length, W_STAGES)):
        _load_weights(weights, w_ring, w_full, first + count, count, sizes, GATED, AT_ONCE, W_STAGES)
    if PDL:  # the previous kernel may write the rows
        gdc_wait()
    for count in range(gl.minimum(length, X_STAGES)):
        _load_rows(x, x_ring, x_full, first + count, count, sizes[0], BLOCK_M, AT_ONCE, X_STAGES)
    for done in range(length - X_STAGES):
        mbarrier.wait(free.index(done % W_STAGES), done // W_STAGES & 1)
        count = done + X_STAGES
        _load_rows(x, x_ring, x_full, first + count, count, sizes[0], BLOCK_M, AT_ONCE, X_STAGES)
        count = done + W_STAGES
        if count < length:
            _load_weights(weights, w_ring, w_full, first + count, count, sizes, GATED, AT_ONCE, W_STAGES)


@gluon.jit
def _write(out, total, row, column, rows, columns):
    at = row.to(gl.int64)[:, None] * columns + column[None, :]
    gl.store(out + at, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & (column < columns)[None, :])


@gluon.jit
def _with_bias(total, bias, column, columns):
    return total + gl.load(bias + column, mask=column < columns, other=0.0).to(gl.float32)[None, :]


@gluon.jit
def _consume(
    tensors,
    rings,
    share,
    numbers,
    WARPGROUP: gl.constexpr,
    GATED: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    X_STAGES: gl.constexpr,
    W_STAGES: gl.constexpr,
    PDL: gl.constexpr,
):
    """Consumer warpgroup: 64 rows of all columns, or where there are only 64 rows, these of half the columns."""
    biases, outs, partials, arrived = tensors
    x_ring, w_ring, x_full, w_full, free = rings
    first, last = share
    rows, columns_0, columns_1, columns_2, tiles_0, tiles_1, units, iterations = numbers
    WIDE: gl.constexpr = BLOCK_M == 128
    COLUMNS: gl.constexpr = BOX if WIDE else BOX // 2
    BOXES: gl.constexpr = 2 if GATED else 1
    SIZE: gl.constexpr = 64 * COLUMNS
    PARTIAL: gl.constexpr = BOXES * SIZE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    own_row = gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    own_column = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))
    row = own_row + (64 * WARPGROUP if WIDE else 0)
    within = own_column + (0 if WIDE else COLUMNS * WARPGROUP)
    # In eights of columns: the 32 threads of a warp write 256 contiguous bytes.
    offset = own_row[:, None] * 8 + (own_column // 8 * 512 + own_column % 8)[None, :]
    programs = gl.num_programs(0)
    own_share = programs - 1 - gl.program_id(0)
    follow_previous(PDL)  # dependents also rely on earlier kernels, so wait before releasing them
    count = 0
    at = first
    while at < last:
        tile = at // iterations
        begin = at - tile * iterations
        end = gl.minimum(iterations, begin + last - at)
        total = gl.zeros([64, COLUMNS], gl.float32, layout)
        second = gl.zeros([64, COLUMNS], gl.float32, layout)
        for number in range(begin, end):
            stage = count % W_STAGES
            mbarrier.wait(w_full.index(stage), count // W_STAGES & 1)
            mbarrier.wait(x_full.index(count % X_STAGES), count // X_STAGES & 1)
            x = x_ring.index(count % X_STAGES)
            w = w_ring.index(stage * BOXES)
            if WIDE:
                x = x.slice(64 * WARPGROUP, 64)
            else:
                w = w.slice(COLUMNS * WARPGROUP, COLUMNS)
            total = warpgroup_mma(x, w.permute((1, 0)), total, is_async=True)
            if GATED:
                w = w_ring.index(stage * BOXES + 1)
                if not WIDE:
                    w = w.slice(COLUMNS * WARPGROUP, COLUMNS)
                second = warpgroup_mma(x, w.permute((1, 0)), second, is_async=True)
                total, second = warpgroup_mma_wait(2, deps=(total, second))
            else:
                total = warpgroup_mma_wait(1, deps=(total,))
            # The products of the iteration before have ended.
            mbarrier.arrive(free.index((count + W_STAGES - 1) % W_STAGES), count=1, pred=number > begin)
            count += 1
        if GATED:
            total, second = warpgroup_mma_wait(0, deps=(total, second))
        else:
            total = warpgroup_mma_wait(0, deps=(total,))
        mbarrier.arrive(free.index((count + W_STAGES - 1) % W_STAGES), count=1)
        # Of the shares that the tile lies in, the first has its begin, and adds up what the others write.
        owner = ((tile * iterations + 1) * programs - 1) // units
        written = arrived + 2 * owner + WARPGROUP
        if begin > 0:
            mine = partials + (2 * own_share + WARPGROUP) * PARTIAL + offset
            gl.store(mine, total)
            if GATED:
                gl.store(mine + SIZE, second)
            group_barrier()  # all threads have written, before one of them says so
            gl.atomic_add(written, 1, sem="release")
        else:
            others = ((tile + 1) * iterations * programs - 1) // units - owner
            if others > 0:
                # These have lower program ids: they have started before this one.
                while gl.atomic_cas(written, others, 0, sem="acquire") != others:
                    pass
                for other in range(owner + 1, owner + 1 + others):
                    theirs = partials + (2 * other + WARPGROUP) * PARTIAL + offset
                    total += gl.load(theirs, cache_modifier=".cg")
                    if GATED:
                        second += gl.load(theirs + SIZE, cache_modifier=".cg")
            if tile < tiles_0:
                out, bias, columns, block = outs[0], biases[0], columns_0, tile
            elif tile < tiles_0 + tiles_1:
                out, bias, columns, block = outs[1], biases[1], columns_1, tile - tiles_0
            else:
                out, bias, columns, block = outs[2], biases[2], columns_2, tile - tiles_0 - tiles_1
            column = block * BOX + within
            if BIAS:
                total = _with_bias(total, bias, column, columns)
            if GATED:
                if BIAS:
                    second = _with_bias(second, biases[1], column, columns)
                # Rounded as where each step is a separate operator.
                dtype: gl.constexpr = outs[0].dtype.element_ty
                gates = total.to(dtype).to(gl.float32)
                total = activated(gates, ACTIVATION).to(dtype).to(gl.float32) * second.to(dtype).to(gl.float32)
            _write(out, total, row, column, rows, columns)
        at += end - begin


@gluon.jit(do_not_specialize=["rows"])
def hopper_row_products(
    x,  # TMA descriptor of [rows, width], in boxes of [BLOCK_M, AT_ONCE]
    weight_0,  # of [columns_0, width], in boxes of [BOX, AT_ONCE]
    weight_1,
    weight_2,
    bias_0,  # [columns_0]; not read without BIAS
    bias_1,
    bias_2,
    out_0,  # [rows, columns_0], contiguous
    out_1,
    out_2,
    partials,  # [programs, BLOCK_M, 2 * BOX if GATED else BOX] fp32, in the layout of the accumulators
    arrived,  # [2 * programs] int32: how many parts that a program waits for are written; 0 before and after
    rows,
    width,
    columns_0,
    columns_1,
    columns_2,
    GATED: gl.constexpr,  # out_0 = activation(x weight_0^T) * (x weight_1^T), with columns_1 = columns_2 = 0
    ACTIVATION: gl.constexpr,
    BIAS: gl.constexpr,
    BLOCK_M: gl.constexpr,  # 64 or 128, at least rows
    AT_ONCE: gl.constexpr,  # elements of a row and of a column per iteration, a divisor of width
    X_STAGES: gl.constexpr,  # iterations whose rows are in flight, at most W_STAGES
    W_STAGES: gl.constexpr,  # those whose weights are
    REGISTERS: gl.constexpr,  # of a thread when the program starts
    PDL: gl.constexpr,
):
    element: gl.constexpr = out_0.dtype.element_ty
    BOXES: gl.constexpr = 2 if GATED else 1
    x_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, AT_ONCE], element)
    w_tile: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BOX, AT_ONCE], element)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    x_ring = gl.allocate_shared_memory(element, [X_STAGES, BLOCK_M, AT_ONCE], x_tile)
    w_ring = gl.allocate_shared_memory(element, [W_STAGES * BOXES, BOX, AT_ONCE], w_tile)
    x_full = gl.allocate_shared_memory(gl.int64, [X_STAGES, 1], barrier)
    w_full = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], barrier)
    free = gl.allocate_shared_memory(gl.int64, [W_STAGES, 1], barrier)
    for stage in gl.static_range(X_STAGES):
        mbarrier.init(x_full.index(stage), count=1)
    for stage in gl.static_range(W_STAGES):
        mbarrier.init(w_full.index(stage), count=1)
        mbarrier.init(free.index(stage), count=2)
    iterations = width // AT_ONCE
    tiles_0 = gl.cdiv(columns_0, BOX)
    tiles_1 = gl.cdiv(columns_1, BOX)
    units = (tiles_0 + tiles_1 + gl.cdiv(columns_2, BOX)) * iterations
    # Programs wait only for those with a lower id, which start before them: these have the shares after theirs.
    programs = gl.num_programs(0)
    own_share = programs - 1 - gl.program_id(0)
    share = (own_share * units // programs, (own_share + 1) * units // programs)
    rings = (x_ring, w_ring, x_full, w_full, free)
    weights = (weight_0, weight_1, weight_2)
    tensors = ((bias_0, bias_1, bias_2), (out_0, out_1, out_2), partials, arrived)
    numbers = (rows, columns_0, columns_1, columns_2, tiles_0, tiles_1, units, iterations)
    sizes = (iterations, tiles_0, tiles_1)
    # Consumers share what the producer leaves of the registers.
    CONSUMER: gl.constexpr = (3 * REGISTERS - 24) // 16 * 8
    gl.warp_specialize(
        [
            (_consume, (tensors, rings, share, numbers, 0, GATED, ACTIVATION, BIAS, BLOCK_M, X_STAGES, W_STAGES, PDL)),
            (_consume, (tensors, rings, share, numbers, 1, GATED, ACTIVATION, BIAS, BLOCK_M, X_STAGES, W_STAGES, PDL)),
            (_produce, (x, weights, rings, share, sizes, GATED, BLOCK_M, AT_ONCE, X_STAGES, W_STAGES, PDL)),
        ],
        [4, 1],
        [CONSUMER, 24],
    )
