# mypy: ignore-errors
"""Sum of products of a few rows with stored matrices, on tensor cores, with fp32 factors in two fp16 parts.

Each program makes some columns of all rows, so that matrices are read once, and adds up in one order. Where columns
make few programs, parts of the width go to programs of their own; the last to arrive adds up all parts, in order.
"""

import triton
import triton.language as tl

REST = tl.constexpr(2.0**11)  # factor on what rounding to fp16 leaves, which keeps it among normal numbers
SMALLEST = tl.constexpr(2.0**-100)
EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def stored_product(
    factor,  # [rows, groups, width]
    matrix,  # [width, groups * columns] fp16, contiguous
    scales,  # [groups * columns] fp32
    second_factor,  # likewise, of SECOND_WIDTH; not read where that is 0
    second_matrix,
    second_scales,
    constant,  # [groups * columns] fp32; not read without CONSTANT
    out,  # [rows, groups * columns]
    partials,  # [PARTS, rows, groups * columns] fp32; not read with one part
    arrived,  # [programs of a part] int32: parts that have arrived, 0 before and after; not read with one part
    rows,
    row_stride,
    group_stride,
    second_row_stride,
    second_group_stride,
    WIDTH: tl.constexpr,
    SECOND_WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr,  # of a group
    PADDED_WIDTH: tl.constexpr,  # a power of 2 that is at least both widths
    CONSTANT: tl.constexpr,
    IN_RANGE: tl.constexpr,  # all factors are in fp16's range
    PARTS: tl.constexpr,  # of the widths
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    BLOCKS: tl.constexpr = (COLUMNS + BLOCK_C - 1) // BLOCK_C
    part = tl.program_id(1)
    group = tl.program_id(0) // BLOCKS
    own = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    kept = own < COLUMNS
    column = group * COLUMNS + own
    row = tl.arange(0, BLOCK_M)
    result = product(
        factor + group * group_stride,
        row_stride,
        matrix,
        scales,
        rows,
        row,
        column,
        kept,
        part,
        WIDTH,
        GROUPS * COLUMNS,
        PADDED_WIDTH,
        IN_RANGE,
        PARTS,
        BLOCK_M,
        BLOCK_K,
        STAGES,
    )
    if SECOND_WIDTH:
        result += product(
            second_factor + group * second_group_stride,
            second_row_stride,
            second_matrix,
            second_scales,
            rows,
            row,
            column,
            kept,
            part,
            SECOND_WIDTH,
            GROUPS * COLUMNS,
            PADDED_WIDTH,
            IN_RANGE,
            PARTS,
            BLOCK_M,
            BLOCK_K,
            STAGES,
        )
    if CONSTANT:
        result += tl.load(constant + column, mask=kept & (part == 0), other=0.0)[None, :]
    at = row.to(tl.int64)[:, None] * (GROUPS * COLUMNS) + column[None, :]
    written = (row < rows)[:, None] & kept[None, :]
    if PARTS > 1:
        of_part = (part * rows + row).to(tl.int64)[:, None] * (GROUPS * COLUMNS) + column[None, :]
        tl.store(partials + of_part, result, mask=written)
        tl.debug_barrier()  # all threads have written, before one of them says so
        counter = arrived + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            tl.store(counter, 0)
            result = tl.zeros(result.shape, tl.float32)
            for other in tl.static_range(PARTS):
                of_part = (other * rows + row).to(tl.int64)[:, None] * (GROUPS * COLUMNS) + column[None, :]
                result += tl.load(partials + of_part, mask=written, other=0.0, cache_modifier=".cg")
            tl.store(out + at, result.to(out.dtype.element_ty), mask=written)
    else:
        tl.store(out + at, result.to(out.dtype.element_ty), mask=written)


@triton.jit
def product(
    factor,  # of the group
    row_stride,
    matrix,
    scales,
    rows,
    row,
    column,
    kept,
    part,
    WIDTH: tl.constexpr,
    ALL_COLUMNS: tl.constexpr,
    PADDED_WIDTH: tl.constexpr,
    IN_RANGE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):
    """``[BLOCK_M, BLOCK_C]`` fp32: some columns of a product over a part of the width, scaled."""
    OF_PART: tl.constexpr = ((WIDTH + PARTS - 1) // PARTS + BLOCK_K - 1) // BLOCK_K * BLOCK_K
    WHOLE: tl.constexpr = WIDTH % BLOCK_K == 0
    HALF: tl.constexpr = factor.dtype.element_ty == tl.float16
    SCALED: tl.constexpr = not (IN_RANGE or HALF)
    has_row = (row < rows)[:, None]
    start = factor + row.to(tl.int64)[:, None] * row_stride
    scale = tl.full([BLOCK_M, 1], 1.0, tl.float32)  # a power of two that brings each row into fp16's range
    if SCALED:
        every = tl.arange(0, PADDED_WIDTH)  # all at once, as each wait for memory takes as long as much of the product
        for index in range(rows):
            numbers = tl.load(factor + index * row_stride + every, mask=every < WIDTH, other=0.0)
            largest = tl.maximum(tl.max(tl.abs(numbers.to(tl.float32)), 0), SMALLEST)
            power = (largest.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
            scale = tl.where((row == index)[:, None], power, scale)
    coarse_sum = tl.zeros([BLOCK_M, column.shape[0]], tl.float32)
    rest_sum = tl.zeros([BLOCK_M, column.shape[0]], tl.float32)
    begin = part * OF_PART
    for first in tl.range(begin, tl.minimum(begin + OF_PART, WIDTH), BLOCK_K, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK_K)
        in_width = (at < WIDTH) | WHOLE
        numbers = tl.load(start + at[None, :], mask=has_row & in_width[None, :], other=0.0)
        entries = matrix + at.to(tl.int64)[:, None] * ALL_COLUMNS + column[None, :]
        tile = tl.load(entries, mask=in_width[:, None] & kept[None, :], other=0.0)
        if HALF:
            coarse_sum = tl.dot(numbers, tile, coarse_sum)
        else:
            numbers = numbers.to(tl.float32)
            if SCALED:
                numbers = numbers / scale
            coarse = numbers.to(tl.float16)
            coarse_sum = tl.dot(coarse, tile, coarse_sum)
            rest = ((numbers - coarse.to(tl.float32)) * REST).to(tl.float16)
            rest_sum = tl.dot(rest, tile, rest_sum)
    result = coarse_sum + rest_sum * (1.0 / REST)
    result = result * tl.load(scales + column, mask=kept, other=0.0)[None, :]
    return result * scale if SCALED else result
