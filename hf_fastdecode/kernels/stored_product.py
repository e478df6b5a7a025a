# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""`stored_product`: a few rows, e.g. averages of keys and V-coordinates, times matrices that are stored in fp16.

The kernel multiplies on tensor cores, with fp32 factors in two fp16 parts.
Each program makes some columns of all rows, so that matrices are read once, and adds up in one order. Where columns
make few programs, parts of the width go to separate programs; the last to arrive adds up all parts, in order.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .ahead import launch
from .device import power_of_two, shared_memory
from .failures import Kernel, launching
from .limits import refused

MOST_ROWS = 64
"""Rows of a factor, which programs hold whole."""

MOST_TERMS = 2

_PROGRAMS = 256  # about two on each multiprocessor


class Term(NamedTuple):
    """A product with a stored matrix."""

    factor: Tensor  # ``[rows, groups, width]``, fp32, fp16 or bf16
    matrix: Tensor  # ``[width, groups * columns]`` fp16: columns of a group are multiplied by its factor
    scales: Tensor  # ``[groups * columns]`` fp32: the matrix is ``matrix * scales``


class ProductConfig(NamedTuple):
    columns: int  # columns per program
    width: int  # elements of each row per iteration
    stages: int = 4  # iterations whose loads are in flight
    warps: int = 4  # warps per program
    parts: int = 1  # parts of the width, each for a program


def choose_config(rows: int, groups: int, width: int, columns: int, itemsize: int, memory: int) -> ProductConfig:
    """Launch parameters, measured on an H200 for one row.

    Args:
        width: Width of the first factor.
        itemsize: Bytes of an element of the factors.
        memory: Bytes of shared memory per block.
    """
    columns_at_once, stages = 64, 4
    per_element = stages * (2 * columns_at_once + itemsize * _padded(rows))
    at_once = next((elements for elements in (128, 64) if elements * per_element <= memory), 32)
    parts = min(_PROGRAMS // (groups * triton.cdiv(columns // groups, columns_at_once)), width // (2 * at_once))
    return ProductConfig(columns_at_once, at_once, stages, parts=max(1, parts))


def _padded(rows: int) -> int:
    return max(16, power_of_two(rows))  # of what tensor cores take


def stored_product(
    terms: list[Term],
    constant: Tensor | None = None,
    config: ProductConfig | None = None,
    *,
    in_range: bool = False,
    arrived: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sum of one or two products, each group's columns by its factor.

    Factors in fp32 keep 22 of their 24 bits; the sums are in fp32. Results are bitwise reproducible.

    Args:
        terms: Up to `MOST_TERMS` products with equal rows (up to `MOST_ROWS`), groups and columns.
        constant: ``[groups * columns]`` fp32, to be added.
        config: Launch parameters; those of `choose_config` when None.
        in_range: Whether all factors are in fp16's range, so that rows need no scaling.
        arrived: `kernels.device.counters`, which no launch uses at the same time; new ones when None.
        dtype: Dtype of the result, to which sums are rounded.

    Returns:
        ``[rows, groups * columns]``.
    """
    _check_shapes(terms)
    terms = [
        Term(factor if factor.stride(-1) == 1 else factor.contiguous(), matrix.contiguous(), scales.contiguous())
        for factor, matrix, scales in terms
    ]
    factor, matrix, _ = terms[0]
    (rows, groups, width), columns, device = factor.shape, matrix.shape[1], factor.device
    of_group = columns // groups
    config = config or choose_config(rows, groups, width, columns, factor.element_size(), shared_memory(device))
    second = terms[-1]
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    programs, partials = groups * triton.cdiv(of_group, config.columns), None
    if config.parts > 1:
        partials = torch.empty(config.parts, rows, columns, dtype=torch.float32, device=device)
        if arrived is None:
            arrived = torch.zeros(programs, dtype=torch.int32, device=device)
        if programs > len(arrived):
            raise ValueError(
                f"stored_product in {config.parts} parts needs {programs} arrival counters, got {len(arrived)}; "
                "choose more columns per program, or 1 part"
            )
    wide = len(terms) > 1
    with launching(Kernel.PRODUCT, device):
        launch(
            _add_products,
            (programs, config.parts),
            *terms[0],
            *second,
            *(constant, out, partials, arrived, rows),
            *factor.stride()[:2],
            *second.factor.stride()[:2],
            WIDTH=width,
            SECOND_WIDTH=second.factor.shape[2] if wide else 0,
            GROUPS=groups,
            COLUMNS=of_group,
            PADDED_WIDTH=power_of_two(max(width, second.factor.shape[2])),
            CONSTANT=constant is not None,
            IN_RANGE=in_range,
            PARTS=config.parts,
            BLOCK_M=_padded(rows),
            BLOCK_C=config.columns,
            BLOCK_K=config.width,
            STAGES=config.stages,
            num_warps=config.warps,
        )
    return out


def _check_shapes(terms: list[Term]) -> None:
    if not 1 <= len(terms) <= MOST_TERMS:
        raise ValueError(f"stored_product takes 1 to {MOST_TERMS} terms, got {len(terms)}")
    (rows, groups, _), columns = terms[0].factor.shape, terms[0].matrix.shape[1]
    if rows > MOST_ROWS:
        raise ValueError(f"stored_product takes at most {MOST_ROWS} rows, got {rows}; call it for parts of them")
    for factor, matrix, scales in terms:
        shapes = tuple(factor.shape), tuple(matrix.shape), tuple(scales.shape)
        if columns % groups or shapes != ((rows, groups, len(matrix)), (len(matrix), columns), (columns,)):
            takes = f"factors [{rows}, {groups}, width], matrices [width, {columns}], of columns that {groups} divides"
            raise refused(f"terms need {takes}, and scales [{columns}]", factor, matrix, scales)


REST = tl.constexpr(2.0**11)  # factor on the remainder after rounding to fp16, which keeps it normal
SMALLEST = tl.constexpr(2.0**-100)
EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def _add_products(
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
    within = tl.program_id(0) % BLOCKS * BLOCK_C + tl.arange(0, BLOCK_C)
    kept = within < COLUMNS
    column = group * COLUMNS + within
    row = tl.arange(0, BLOCK_M)
    ALL_COLUMNS: tl.constexpr = GROUPS * COLUMNS
    here = (rows, row, column, kept, part)
    term = (factor + group * group_stride, row_stride, matrix, scales)
    result = _product(term, here, WIDTH, ALL_COLUMNS, PADDED_WIDTH, IN_RANGE, PARTS, BLOCK_M, BLOCK_K, STAGES)
    if SECOND_WIDTH:
        term = (second_factor + group * second_group_stride, second_row_stride, second_matrix, second_scales)
        result += _product(
            term, here, SECOND_WIDTH, ALL_COLUMNS, PADDED_WIDTH, IN_RANGE, PARTS, BLOCK_M, BLOCK_K, STAGES
        )
    if CONSTANT:
        result += tl.load(constant + column, mask=kept & (part == 0), other=0.0)[None, :]
    at = row.to(tl.int64)[:, None] * ALL_COLUMNS + column[None, :]
    written = (row < rows)[:, None] & kept[None, :]
    if PARTS > 1:
        of_part = (part * rows + row).to(tl.int64)[:, None] * ALL_COLUMNS + column[None, :]
        tl.store(partials + of_part, result, mask=written)
        tl.debug_barrier()  # all threads have written, before one of them says so
        counter = arrived + tl.program_id(0)
        if tl.atomic_add(counter, 1, sem="acq_rel") == PARTS - 1:
            tl.store(counter, 0)
            result = tl.zeros(result.shape, tl.float32)
            for other in tl.static_range(PARTS):
                of_part = (other * rows + row).to(tl.int64)[:, None] * ALL_COLUMNS + column[None, :]
                result += tl.load(partials + of_part, mask=written, other=0.0, cache_modifier=".cg")
            tl.store(out + at, result.to(out.dtype.element_ty), mask=written)
    else:
        tl.store(out + at, result.to(out.dtype.element_ty), mask=written)


@triton.jit
def _product(
    term,  # factor of the group, its row stride, matrix and scales
    here,  # rows, indices of rows and columns, which columns there are, and the part of the width
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
    factor, row_stride, matrix, scales = term
    rows, row, column, kept, part = here
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
            elements = tl.load(factor + index * row_stride + every, mask=every < WIDTH, other=0.0)
            largest = tl.maximum(tl.max(tl.abs(elements.to(tl.float32)), 0), SMALLEST)
            power = (largest.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)
            scale = tl.where((row == index)[:, None], power, scale)
    coarse_sum = tl.zeros([BLOCK_M, column.shape[0]], tl.float32)
    rest_sum = tl.zeros([BLOCK_M, column.shape[0]], tl.float32)
    begin = part * OF_PART
    for first in tl.range(begin, tl.minimum(begin + OF_PART, WIDTH), BLOCK_K, num_stages=STAGES):
        at = first + tl.arange(0, BLOCK_K)
        in_width = (at < WIDTH) | WHOLE
        elements = tl.load(start + at[None, :], mask=has_row & in_width[None, :], other=0.0)
        entries = matrix + at.to(tl.int64)[:, None] * ALL_COLUMNS + column[None, :]
        tile = tl.load(entries, mask=in_width[:, None] & kept[None, :], other=0.0)
        if HALF:
            coarse_sum = tl.dot(elements, tile, coarse_sum)
        else:
            elements = elements.to(tl.float32)
            if SCALED:
                elements = elements / scale
            coarse = elements.to(tl.float16)
            coarse_sum = tl.dot(coarse, tile, coarse_sum)
            rest = ((elements - coarse.to(tl.float32)) * REST).to(tl.float16)
            rest_sum = tl.dot(rest, tile, rest_sum)
    result = coarse_sum + rest_sum * (1.0 / REST)
    result = result * tl.load(scales + column, mask=kept, other=0.0)[None, :]
    return result * scale if SCALED else result
