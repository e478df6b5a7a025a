"""`stored_product`: a few rows, e.g. averages of keys and V-coordinates, times matrices that are stored in fp16."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..ahead import launch
from ..device import interpreted, shared_memory
from ..failures import Kernel, launching
from .kernel import stored_product as kernel

MOST_ROWS = 64
"""Rows of a factor, which programs hold whole."""

MOST_TERMS = 2

_PROGRAMS = 256  # about two on each multiprocessor


class Term(NamedTuple):
    """A product with a stored matrix.

    Attributes:
        factor: ``[rows, groups, width]``, fp32, fp16 or bf16.
        matrix: ``[width, groups * columns]`` fp16: columns of a group are multiplied by its factor.
        scales: ``[groups * columns]`` fp32: the matrix is ``matrix * scales``.
    """

    factor: Tensor
    matrix: Tensor
    scales: Tensor


class ProductConfig(NamedTuple):
    """Launch parameters.

    Attributes:
        columns: Columns per program.
        width: Elements of each row per iteration.
        stages: Iterations whose loads are in flight.
        warps: Warps per program.
        parts: Parts of the width, each for a program.
    """

    columns: int
    width: int
    stages: int = 4
    warps: int = 4
    parts: int = 1


def choose_config(rows: int, groups: int, width: int, columns: int, itemsize: int, memory: int) -> ProductConfig:
    """Launch parameters, measured on an H200 for one row.

    Args:
        width: Width of the first factor.
        itemsize: Bytes of an element of the factors.
        memory: Bytes of shared memory per block.
    """
    own, stages = 64, 4
    per_number = stages * (2 * own + itemsize * _padded(rows))
    at_once = next((numbers for numbers in (128, 64) if numbers * per_number <= memory), 32)
    parts = min(_PROGRAMS // (groups * triton.cdiv(columns // groups, own)), width // (2 * at_once))
    return ProductConfig(own, at_once, stages, parts=max(1, parts))


def _padded(rows: int) -> int:
    return max(16, triton.next_power_of_2(rows))  # of what tensor cores take


def stored_product(
    terms: list[Term],
    constant: Tensor | None = None,
    config: ProductConfig | None = None,
    *,
    in_range: bool = False,
    arrived: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Sum of one or two products, each group's columns by its own factor.

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

    Raises:
        ValueError: There are more terms or rows than the kernel takes, fewer counters than programs of a part, or
            shapes do not fit each other.
        KernelFailedError: The kernel cannot be compiled or launched here.
    """
    _check_shapes(terms)
    terms = [
        Term(_with_contiguous_rows(factor), matrix.contiguous(), scales.contiguous())
        for factor, matrix, scales in terms
    ]
    factor, matrix, _ = terms[0]
    (rows, groups, width), columns, device = factor.shape, matrix.shape[1], factor.device
    of_group = columns // groups
    config = config or choose_config(rows, groups, width, columns, factor.element_size(), shared_memory(device))
    second = terms[-1]
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    programs, partials = groups * triton.cdiv(of_group, config.columns), out
    if config.parts > 1:
        partials = torch.empty(config.parts, rows, columns, dtype=torch.float32, device=device)
        if arrived is None:
            arrived = torch.zeros(programs, dtype=torch.int32, device=device)
        if programs > len(arrived):
            raise ValueError(
                f"stored_product in {config.parts} parts needs {programs} arrival counters, got {len(arrived)}; "
                "choose more columns per program, or 1 part"
            )
    with launching(Kernel.PRODUCT, device):
        launch(
            kernel,
            (programs, config.parts),
            *terms[0],
            *second,
            constant if constant is not None else out,
            out,
            partials,
            out if arrived is None else arrived,
            rows,
            *factor.stride()[:2],
            *second.factor.stride()[:2],
            WIDTH=width,
            SECOND_WIDTH=second.factor.shape[2] if len(terms) > 1 else 0,
            GROUPS=groups,
            COLUMNS=of_group,
            PADDED_WIDTH=triton.next_power_of_2(max(width, second.factor.shape[2])),
            CONSTANT=constant is not None,
            IN_RANGE=in_range,
            PARTS=config.parts,
            BLOCK_M=_padded(rows),
            BLOCK_C=config.columns,
            BLOCK_K=config.width,
            STAGES=config.stages if not interpreted() else 1,
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
            raise ValueError(
                f"terms need factors [{rows}, {groups}, width], matrices [width, {columns}] with columns divisible by "
                f"{groups}, and scales [{columns}], got {', '.join(map(str, shapes))}"
            )


def _with_contiguous_rows(factor: Tensor) -> Tensor:
    return factor if factor.stride(-1) == 1 else factor.contiguous()
