# mypy: ignore-errors
"""Merge of the partials of several devices, each over its own keys, in their order (Tree Attention, section 5)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..ahead import launch
from ..failures import Kernel, launching

_QUERIES = 4
"""Queries of a program: few, so that a step of one row fills the multiprocessors."""


def merge_ranks(gathered: Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge partials into `out` and `lse`; an empty part has weight 0, and the union of empty ones is ``(0, -inf)``.

    Args:
        gathered: ``[ranks, numbers]`` fp32, contiguous: of each rank its ``out`` and then its log-sum-exp, contiguous.
        out: ``[..., head_dim]``, contiguous.
        lse: ``[...]`` fp32, contiguous.
    """
    ranks, numbers = gathered.shape
    queries, width = lse.numel(), out.shape[-1]
    if numbers != queries * (width + 1):
        raise ValueError(f"{queries} queries of {width} numbers give {queries * (width + 1)} a rank, got {numbers}")
    if not queries:
        return
    with launching(Kernel.MERGE, gathered.device):
        launch(
            _merge_ranks,
            (triton.cdiv(queries, _QUERIES),),
            gathered,
            out,
            lse,
            queries,
            ranks,
            WIDTH=width,
            BLOCK_D=triton.next_power_of_2(width),
            QUERIES=_QUERIES,
            num_warps=4,
        )


@triton.jit(do_not_specialize=["queries", "ranks"])
def _merge_ranks(
    gathered, out, lse, queries, ranks, WIDTH: tl.constexpr, BLOCK_D: tl.constexpr, QUERIES: tl.constexpr
):
    queries = queries.to(tl.int64)  # of many rows and ranks there are more than 2^31 numbers
    query = tl.program_id(0).to(tl.int64) * QUERIES + tl.arange(0, QUERIES)
    column = tl.arange(0, BLOCK_D)
    inside = query < queries
    valid = inside[:, None] & (column < WIDTH)[None, :]
    at = query[:, None] * WIDTH + column[None, :]
    numbers = queries * (WIDTH + 1)
    largest = tl.full((QUERIES,), float("-inf"), tl.float32)
    for rank in range(ranks):
        of_rank = tl.load(gathered + rank * numbers + queries * WIDTH + query, mask=inside, other=float("-inf"))
        largest = tl.maximum(largest, of_rank)
    shift = tl.where(largest == float("-inf"), 0.0, largest)  # -inf - (-inf) would be nan
    total = tl.zeros((QUERIES,), tl.float32)
    mean = tl.zeros((QUERIES, BLOCK_D), tl.float32)
    for rank in range(ranks):
        part = gathered + rank * numbers
        of_rank = tl.load(part + queries * WIDTH + query, mask=inside, other=float("-inf"))
        weight = tl.exp(of_rank - shift)
        total += weight
        mean += weight[:, None] * tl.load(part + at, mask=valid, other=0.0)
    divisor = tl.where(total > 0, total, 1.0)
    tl.store(out + at, (mean / divisor[:, None]).to(out.dtype.element_ty), mask=valid)
    tl.store(lse + query, tl.where(total > 0, shift + tl.log(divisor), float("-inf")), mask=inside)
