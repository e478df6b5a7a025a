# mypy: ignore-errors
"""Products of a few rows with up to three weights, or with those of a gate, on tensor cores.

Each program reads some rows of one weight, or a part of these. Where a weight has too few rows to keep every
multiprocessor reading, parts go to separate programs; the last to arrive adds all parts up, in their order.
"""

import triton
import triton.language as tl

from ..pointwise.kernel import activated, follow_previous


@triton.jit(do_not_specialize=["rows", "parts"])  # a variant for each value would be compiled for nothing
def row_products(
    x,  # [rows, width], contiguous
    weight_0,  # [columns_0, width], contiguous, as of `nn.Linear`
    weight_1,
    weight_2,
    bias_0,  # [columns_0]; not read without BIAS
    bias_1,
    bias_2,
    out_0,  # [rows, columns_0], contiguous, in the dtype of x or, without GATED, in fp32
    out_1,
    out_2,
    partials,  # [tiles, parts, 2 if GATED else 1, BLOCK_N, BLOCK_M] fp32; not read with one part
    arrived,  # [tiles] int32: parts that have arrived, 0 before and after; not read with one part
    rows,
    width,
    columns_0,
    columns_1,
    columns_2,
    parts,
    part_width,  # of each part but the last, a multiple of BLOCK_K
    GATED: tl.constexpr,  # out_0 = activation(x weight_0^T) * (x weight_1^T), with columns_1 = columns_2 = 0
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,  # at least rows
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a divisor of width
    STAGES: tl.constexpr,
    PDL: tl.constexpr,  # it starts while the previous kernel ends (programmatic dependent launch)
):
    tile, part = tl.program_id(0), tl.program_id(1)
    tiles_0, tiles_1 = tl.cdiv(columns_0, BLOCK_N), tl.cdiv(columns_1, BLOCK_N)
    if tile < tiles_0:
        weight, bias, out, columns, block = weight_0, bias_0, out_0, columns_0, tile
    elif tile < tiles_0 + tiles_1:
        weight, bias, out, columns, block = weight_1, bias_1, out_1, columns_1, tile - tiles_0
    else:
        weight, bias, out, columns, block = weight_2, bias_2, out_2, columns_2, tile - tiles_0 - tiles_1
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    row, within = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    # Columns beyond the last read its weights again, and write nothing.
    at = tl.minimum(column, columns - 1).to(tl.int64)[:, None] * width + within[None, :]
    here = row[None, :] * width + within[:, None]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    second = total
    first = part * part_width
    follow_previous(PDL)
    for start in tl.range(first, tl.minimum(first + part_width, width), BLOCK_K, num_stages=STAGES):
        inputs = tl.load(x + here + start, mask=(row < rows)[None, :], other=0.0)
        total = tl.dot(tl.load(weight + at + start, eviction_policy="evict_first"), inputs, total)
        if GATED:
            second = tl.dot(tl.load(weight_1 + at + start, eviction_policy="evict_first"), inputs, second)
    if parts > 1:
        TILE: tl.constexpr = BLOCK_N * BLOCK_M
        SIZE: tl.constexpr = 2 * TILE if GATED else TILE
        mine = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + row[None, :]
        of_tile = partials + tile.to(tl.int64) * parts * SIZE
        tl.store(of_tile + part * SIZE + mine, total)
        if GATED:
            tl.store(of_tile + part * SIZE + TILE + mine, second)
        tl.debug_barrier()  # all threads have written, before one of them says so
        last = tl.atomic_add(arrived + tile, 1, sem="acq_rel") == parts - 1
        if last:
            tl.store(arrived + tile, 0)
            total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            second = total
            for other in tl.range(0, parts):
                total += tl.load(of_tile + other * SIZE + mine, cache_modifier=".cg")
                if GATED:
                    second += tl.load(of_tile + other * SIZE + TILE + mine, cache_modifier=".cg")
    else:
        last = True
    dtype: tl.constexpr = x.dtype.element_ty
    if BIAS:
        kept = column < columns
        total += tl.load(bias + column, mask=kept, other=0.0).to(tl.float32)[:, None]
        if GATED:
            second += tl.load(bias_1 + column, mask=kept, other=0.0).to(tl.float32)[:, None]
    if GATED:  # rounded as where each step is a separate operator
        gates, ups = total.to(dtype).to(tl.float32), second.to(dtype).to(tl.float32)
        total = activated(gates, ACTIVATION).to(dtype).to(tl.float32) * ups
    written = last & (row < rows)[None, :] & (column < columns)[:, None]
    total = total.to(out_0.dtype.element_ty)
    tl.store(out + row[None, :] * columns + column[:, None], total, mask=written)
