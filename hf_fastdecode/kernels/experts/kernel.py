# mypy: ignore-errors
"""Kernels of experts: products of pairs of a row and an expert with the expert's weights, and their sum.

An item is up to BLOCK_M pairs of one expert; each program finds the pairs of its own. Grids depend on the number of
pairs alone, so that they can be captured: programs of items that are left over end at once. Each pair's numbers are
computed and added up in a fixed order.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..forest_decode.node_kernel import prefetch
from ..pointwise.kernel import SILU, activated

LEAST = tl.constexpr(-(1 << 63))  # of 64-bit integers


@triton.jit
def pairs_of(
    chosen, item, pairs, EXPERTS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The expert of an item, how many pairs it has, and these ``[BLOCK_M]``; 0 or fewer of an item that is left over.

    Pairs of an expert lie in their order, up to BLOCK_M to an item.
    """
    pair, number, place = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_M)
    expert = expert_of(chosen, pair, pairs, EXPERTS)
    count = tl.histogram(expert, BLOCK_E, mask=expert < EXPERTS)
    blocks = (count + BLOCK_M - 1) // BLOCK_M
    own = tl.sum((tl.cumsum(blocks, 0) <= item).to(tl.int32), 0)
    first = (item - tl.sum(tl.where(number < own, blocks, 0), 0)) * BLOCK_M
    left = tl.sum(tl.where(number == own, count, 0), 0) - first
    mine = expert == own
    rank = tl.where(mine, tl.cumsum(mine.to(tl.int32), 0) - 1 - first, -1)
    found = tl.sum(tl.where(rank[None, :] == place[:, None], pair[None, :], 0), 1)
    return own.to(tl.int64), tl.minimum(left, BLOCK_M), found


@triton.jit
def expert_of(chosen, pair, pairs, EXPERTS: tl.constexpr):
    """The expert of a pair; behind all experts for others, and beyond the last pair."""
    expert = tl.load(chosen + pair, mask=pair < pairs, other=EXPERTS).to(tl.int32)
    return tl.where((expert >= 0) & (expert < EXPERTS), expert, EXPERTS)


@triton.jit
def opened(gates, ups, alpha, limit, offset, ACTIVATION: tl.constexpr):
    """See `forms.Gate`, of fp32 numbers."""
    gates = tl.minimum(gates, limit, propagate_nan=tl.PropagateNan.ALL)
    ups = tl.maximum(ups, -limit, propagate_nan=tl.PropagateNan.ALL)
    ups = tl.minimum(ups, limit, propagate_nan=tl.PropagateNan.ALL) + offset
    if ACTIVATION == SILU:
        gates = gates / (1.0 + tl.exp(-alpha * gates))
    else:
        gates = activated(gates, ACTIVATION)
    return gates * ups


@triton.jit
def prefetch_weights(
    weight,
    block,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUMBERS: tl.constexpr,
):
    """Prefetch the first NUMBERS of each column of a tile to L2."""
    LINE: tl.constexpr = 128 // (weight.dtype.element_ty.primitive_bitwidth // 8)
    if TRANSPOSED:
        column, within = block * BLOCK_N + tl.arange(0, BLOCK_N // LINE) * LINE, tl.arange(0, NUMBERS)
        at = column[:, None] + within[None, :] * COLUMNS
    else:
        column, within = block * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, NUMBERS // LINE) * LINE
        at = column[:, None] * WIDTH + within[None, :]
    prefetch((weight + at).to(tl.int64), (column < COLUMNS)[:, None] & (within < WIDTH)[None, :])


@triton.jit(do_not_specialize=["pairs"])
def products(
    x,  # [pairs // PAIRS_PER_ROW, WIDTH], contiguous
    weight,  # [experts, COLUMNS, WIDTH], or where TRANSPOSED [experts, WIDTH, COLUMNS]; contiguous
    bias,  # [experts, COLUMNS]; not read without BIAS
    out,  # GATED: [pairs, COLUMNS // 2] in the dtype of x; else [pairs, COLUMNS] fp32
    chosen,  # [pairs] integers, the expert of each pair; pairs of others than the EXPERTS are left out
    pairs,
    alpha,  # as in `forms.Gate`; not read without GATED
    limit,
    offset,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    GATED: tl.constexpr,  # columns are gates and what these open, all gates first or INTERLEAVED
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_P: tl.constexpr,  # at least pairs
    BLOCK_E: tl.constexpr,  # at least EXPERTS
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,  # a divisor of WIDTH
    STAGES: tl.constexpr,
    AHEAD: tl.constexpr,  # numbers of a column prefetched before the previous kernel has ended, which read chosen
    PDL: tl.constexpr,  # it starts while the previous kernel ends (programmatic dependent launch)
):
    HALF: tl.constexpr = BLOCK_N // 2
    INNER: tl.constexpr = COLUMNS // 2
    block, item = tl.program_id(0), tl.program_id(1)
    if PDL and AHEAD == 0:
        gdc_wait()
        gdc_launch_dependents()
    expert, count, pair = pairs_of(chosen, item, pairs, EXPERTS, BLOCK_P, BLOCK_E, BLOCK_M)
    weight += expert * WIDTH * COLUMNS
    if PDL and AHEAD > 0:
        if count > 0:
            prefetch_weights(weight, block, WIDTH, COLUMNS, TRANSPOSED, BLOCK_N, AHEAD)
        gdc_wait()
        gdc_launch_dependents()
    if count > 0:
        there = tl.arange(0, BLOCK_M) < count
        number, within = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        if GATED and not INTERLEAVED:
            inner = block * HALF + number % HALF
            column, kept = inner + number // HALF * INNER, inner < INNER
        else:
            column = block * BLOCK_N + number
            kept = column < COLUMNS
        if TRANSPOSED:
            column = tl.max_contiguous(tl.multiple_of(column, 16), 16)
            at = column[:, None] + within[None, :] * COLUMNS
        else:
            at = column[:, None] * WIDTH + within[None, :]
        here = (pair // PAIRS_PER_ROW)[None, :] * WIDTH + within[:, None]
        total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
        for start in tl.range(0, WIDTH, BLOCK_K, num_stages=STAGES):
            numbers = tl.load(x + here + start, mask=there[None, :], other=0.0)
            further = start * COLUMNS if TRANSPOSED else start
            own = tl.load(weight + at + further, mask=kept[:, None], other=0.0, eviction_policy="evict_first")
            total = tl.dot(own, numbers, total)
        if BIAS:
            total += tl.load(bias + expert * COLUMNS + column, mask=kept, other=0.0).to(tl.float32)[:, None]
        if GATED:
            if INTERLEAVED:
                gates, ups = tl.split(tl.permute(tl.reshape(total, (HALF, 2, BLOCK_M)), (0, 2, 1)))
            else:
                gates, ups = tl.split(tl.permute(tl.reshape(total, (2, HALF, BLOCK_M)), (1, 2, 0)))
            inner = block * HALF + tl.arange(0, HALF)
            to = pair[None, :] * INNER + inner[:, None]
            result = opened(gates, ups, alpha, limit, offset, ACTIVATION).to(out.dtype.element_ty)
            tl.store(out + to, result, mask=there[None, :] & (inner < INNER)[:, None])
        else:
            to = pair[None, :] * COLUMNS + column[:, None]
            tl.store(out + to, total, mask=there[None, :] & kept[:, None])


@triton.jit
def add_up(
    products,  # [pairs, COLUMNS] fp32
    chosen,  # [pairs], as of `products`: what is left out there is not read here
    shares,  # [pairs]
    out,  # [pairs // PAIRS_PER_ROW, COLUMNS]
    EXPERTS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_P: tl.constexpr,  # at least PAIRS_PER_ROW
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column, own = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_P)
    pair, kept = row * PAIRS_PER_ROW + own, column < COLUMNS
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    expert = tl.load(chosen + pair, mask=own < PAIRS_PER_ROW, other=-1)
    there = (expert >= 0) & (expert < EXPERTS)
    share = tl.load(shares + pair, mask=there, other=0.0).to(tl.float32)
    at = pair[:, None] * COLUMNS + column[None, :]
    numbers = tl.load(products + at, mask=there[:, None] & kept[None, :], other=0.0)
    result = tl.sum(numbers * share[:, None], 0)
    tl.store(out + row * COLUMNS + column, result.to(out.dtype.element_ty), mask=kept)


@triton.jit
def open_sorted(
    gate_up,  # [pairs, 2 * INNER], of pairs in the order of experts
    bias,  # [experts, 2 * INNER]; not read without BIAS
    chosen,  # [pairs] integers, in the order of experts
    order,  # [pairs] int64: number of each pair
    places,  # [pairs] int32: place in the order of experts of each pair, written here
    out,  # [pairs, INNER]
    alpha,  # as in `forms.Gate`
    limit,
    offset,
    INNER: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    place, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if block == 0:
        tl.store(places + tl.load(order + place), place.to(tl.int32))
    column = block * BLOCK_C + tl.arange(0, BLOCK_C)
    if INTERLEAVED:
        both = 2 * block * BLOCK_C + tl.arange(0, 2 * BLOCK_C)
        numbers = tl.load(gate_up + place * (2 * INNER) + both, mask=both < 2 * INNER, other=0.0).to(tl.float32)
        if BIAS:
            of_expert = bias + tl.load(chosen + place).to(tl.int64) * (2 * INNER)
            numbers += tl.load(of_expert + both, mask=both < 2 * INNER, other=0.0).to(tl.float32)
        gates, ups = tl.split(tl.reshape(numbers, (BLOCK_C, 2)))
    else:
        at, kept = gate_up + place * (2 * INNER) + column, column < INNER
        gates = tl.load(at, mask=kept, other=0.0).to(tl.float32)
        ups = tl.load(at + INNER, mask=kept, other=0.0).to(tl.float32)
        if BIAS:
            of_expert = bias + tl.load(chosen + place).to(tl.int64) * (2 * INNER) + column
            gates += tl.load(of_expert, mask=kept, other=0.0).to(tl.float32)
            ups += tl.load(of_expert + INNER, mask=kept, other=0.0).to(tl.float32)
    result = opened(gates, ups, alpha, limit, offset, ACTIVATION)
    tl.store(out + place * INNER + column, result.to(out.dtype.element_ty), mask=column < INNER)


@triton.jit
def add_up_sorted(
    products,  # [pairs, COLUMNS], of pairs in the order of experts
    bias,  # [experts, COLUMNS]; not read without BIAS
    chosen,  # [pairs] integers
    places,  # [pairs] int32, as `open_sorted` writes them
    shares,  # [pairs]
    out,  # [pairs // PAIRS_PER_ROW, COLUMNS]
    COLUMNS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    kept = column < COLUMNS
    total = tl.zeros((BLOCK_C,), tl.float32)
    for own in tl.static_range(PAIRS_PER_ROW):
        pair = row * PAIRS_PER_ROW + own
        at = tl.load(places + pair).to(tl.int64) * COLUMNS + column
        numbers = tl.load(products + at, mask=kept, other=0.0).to(tl.float32)
        if BIAS:
            of_expert = bias + tl.load(chosen + pair).to(tl.int64) * COLUMNS + column
            numbers += tl.load(of_expert, mask=kept, other=0.0).to(tl.float32)
        total += numbers * tl.load(shares + pair).to(tl.float32)
    tl.store(out + row * COLUMNS + column, total.to(out.dtype.element_ty), mask=kept)


@triton.jit
def largest(
    scores,  # [rows, COLUMNS], contiguous
    values,  # [rows, COUNT]: the largest of each row, in falling order
    columns,  # [rows, COUNT] int64: where they are; of equal ones the first comes first
    COLUMNS: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,  # at least COLUMNS
    PDL: tl.constexpr,
):
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    # A number's bits, as an integer of the same order, before its column from behind: no two are equal, and NaN is
    # larger than any number.
    score = tl.load(scores + row * COLUMNS + column, mask=column < COLUMNS, other=0.0).to(tl.float32)
    bits = score.to(tl.int32, bitcast=True)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    key = bits.to(tl.int64) * (1 << 32) + (BLOCK - 1 - column)
    key = tl.where(column < COLUMNS, key, LEAST)
    for place in tl.static_range(COUNT):
        most = tl.max(key, 0)
        bits = (most >> 32).to(tl.int32)
        value = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
        tl.store(values + row * COUNT + place, value.to(values.dtype.element_ty))
        tl.store(columns + row * COUNT + place, BLOCK - 1 - (most & 0xFFFFFFFF))
        key = tl.where(key == most, LEAST, key)
