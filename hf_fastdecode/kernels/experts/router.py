# mypy: ignore-errors
"""Kernel of routers: scores of experts for a few rows, the largest of each row, and their shares, in one launch.

Each program multiplies a part of the width; the last to arrive adds all parts up, in their order, and chooses.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .kernel import LEAST, ordered


@triton.jit(do_not_specialize=["rows"])
def route(
    x,  # [rows, WIDTH], contiguous
    weight,  # [EXPERTS, WIDTH], contiguous, in the dtype of x
    bias,  # [EXPERTS]; not read without BIAS
    scores,  # [rows, EXPERTS], in the dtype of x
    shares,  # [rows, COUNT]
    chosen,  # [rows, COUNT] int64
    partials,  # [parts, BLOCK_M, BLOCK_E] fp32
    arrived,  # [1] int32: parts that have arrived, 0 before and after
    rows,
    WIDTH: tl.constexpr,
    EXPERTS: tl.constexpr,
    COUNT: tl.constexpr,
    BIAS: tl.constexpr,
    FIRST: tl.constexpr,  # the softmax is of all scores; else of the largest
    BLOCK_M: tl.constexpr,  # at least rows
    BLOCK_E: tl.constexpr,  # at least EXPERTS
    BLOCK_K: tl.constexpr,  # numbers of a part
    BLOCK_T: tl.constexpr,  # at least COUNT
    PARTS: tl.constexpr,
    PDL: tl.constexpr,  # it starts while the previous kernel ends (programmatic dependent launch)
):
    part = tl.program_id(0)
    row, expert = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_E)
    within = part * BLOCK_K + tl.arange(0, BLOCK_K)
    there, kept = row < rows, expert < EXPERTS
    own = tl.load(
        weight + expert[:, None] * WIDTH + within[None, :], mask=kept[:, None] & (within < WIDTH)[None, :], other=0.0
    )
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    numbers = tl.load(
        x + row[None, :] * WIDTH + within[:, None], mask=there[None, :] & (within < WIDTH)[:, None], other=0.0
    )
    total = tl.trans(tl.dot(own, numbers))  # [BLOCK_M, BLOCK_E]
    mine = row[:, None] * BLOCK_E + expert[None, :]
    tl.store(partials + part * BLOCK_M * BLOCK_E + mine, total)
    tl.debug_barrier()  # all threads have written, before one of them says so
    if tl.atomic_add(arrived, 1, sem="acq_rel") == PARTS - 1:
        tl.store(arrived, 0)
        total = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
        for other in tl.static_range(PARTS):
            total += tl.load(partials + other * BLOCK_M * BLOCK_E + mine, cache_modifier=".cg")
        if BIAS:
            total += tl.load(bias + expert, mask=kept, other=0.0).to(tl.float32)[None, :]
        rounded = total.to(scores.dtype.element_ty)
        tl.store(scores + row[:, None] * EXPERTS + expert[None, :], rounded, mask=there[:, None] & kept[None, :])
        score = rounded.to(tl.float32)
        if FIRST:
            score = tl.where(kept[None, :], score, float("-inf"))
            score = tl.exp(score - tl.max(score, 1)[:, None])
            score = score / tl.sum(score, 1)[:, None]
        # As in `largest`.
        key = ordered(score.to(tl.int32, bitcast=True)).to(tl.int64) * (1 << 32) + (BLOCK_E - 1 - expert)[None, :]
        key = tl.where(kept[None, :], key, LEAST)
        place = tl.arange(0, BLOCK_T)
        values = tl.full((BLOCK_M, BLOCK_T), float("-inf"), tl.float32)
        columns = tl.zeros((BLOCK_M, BLOCK_T), tl.int64)
        for number in tl.static_range(COUNT):
            most = tl.max(key, 1)
            value = ordered((most >> 32).to(tl.int32)).to(tl.float32, bitcast=True)
            values = tl.where((place == number)[None, :], value[:, None], values)
            columns = tl.where((place == number)[None, :], (BLOCK_E - 1 - (most & 0xFFFFFFFF))[:, None], columns)
            key = tl.where(key == most[:, None], LEAST, key)
        if not FIRST:
            values = tl.exp(values - tl.max(values, 1)[:, None])
            values = values / tl.sum(values, 1)[:, None]
        to = row[:, None] * COUNT + place[None, :]
        written = there[:, None] & (place < COUNT)[None, :]
        tl.store(shares + to, values.to(shares.dtype.element_ty), mask=written)
        tl.store(chosen + to, columns, mask=written)
